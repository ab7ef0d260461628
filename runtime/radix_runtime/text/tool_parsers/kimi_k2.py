"""Kimi K2: a section of calls, each with an id that has the tool's name in it."""

from ..machine import NotACall, Reader
from .base import CallHead, JsonCalls, optional, require_name
from .form import CallForm

_SECTION = "<|tool_calls_section_begin|>"
_SECTION_END = "<|tool_calls_section_end|>"
_CALL = "<|tool_call_begin|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_CALL_END = "<|tool_call_end|>"


class KimiK2Parser(JsonCalls):
    """<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>
    in a section. The id is the model's own and comes back with the tool's answer."""

    form = CallForm(
        opening=_SECTION,
        section=_SECTION,
        call=f"{_CALL}functions.{{name}}:",
        number="[0-9]{1,3}",
        call_rest=_ARGUMENTS,
        call_end=_CALL_END,
        section_end=_SECTION_END,
    )
    openings = (_SECTION,)
    markers = (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END)

    def _first_head(self, reader: Reader) -> CallHead:
        reader.word(_SECTION)
        return self._next_head(reader)

    def _next_head(self, reader: Reader) -> CallHead:
        reader.space()
        reader.word(_CALL)
        call_id = reader.until(_ARGUMENTS).strip()
        reader.space()
        if reader.peek() != "{":
            raise NotACall
        name = call_id.removeprefix("functions.").rpartition(":")[0]
        return CallHead(require_name(name), call_id)

    def _section_end(self, reader: Reader) -> None:
        reader.space()
        reader.word(_SECTION_END)

    def _call_end(self, reader: Reader) -> None:
        optional(reader, _CALL_END)
