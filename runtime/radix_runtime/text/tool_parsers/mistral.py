"""Mistral: [TOOL_CALLS] and a JSON array, or a name and its arguments."""

import secrets

from ..machine import NotACall, Reader
from .base import CallHead, JsonCalls, object_end, object_head, optional, require_name
from .form import CallForm

_CALLS = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_ID = "[CALL_ID]"


class MistralParser(JsonCalls):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or, of tokenizers from version 11 on,
    [TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]..."""

    form = CallForm(
        opening=_CALLS,
        section=f"{_CALLS}[",
        call='{"name": "{name}", "arguments": ',
        call_end="}",
        separator=", ",
        section_end="]",
    )
    openings = (_CALLS,)
    markers = (_CALLS, _ARGS, _ID)
    _in_array = False

    @classmethod
    def form_for(cls, template: str) -> CallForm | None:
        """An array, or names where the template writes them."""
        if _ARGS in template:
            return CallForm(opening=_CALLS, call=f"{_CALLS}{{name}}{_ARGS}", call_end="")
        return cls.form

    def new_id(self) -> str:
        """Its templates take ids of nine letters and digits only."""
        return secrets.token_hex(5)[:9]

    def _first_head(self, reader: Reader) -> CallHead:
        reader.word(_CALLS)
        reader.space()
        if reader.peek() == "[":
            reader.word("[")
            reader.space()
            call = object_head(reader, arguments=("arguments", "parameters"))
            self._in_array = True
            return call
        call = _named(reader)
        self._in_array = False
        return call

    def _next_head(self, reader: Reader) -> CallHead:
        if self._in_array:
            reader.space()
            reader.word(",")
            reader.space()
            return object_head(reader, arguments=("arguments", "parameters"))
        return super()._next_head(reader)

    def _section_end(self, reader: Reader) -> None:
        if not self._in_array or not optional(reader, "]"):
            raise NotACall

    def _call_end(self, reader: Reader) -> None:
        if self._in_array:
            object_end(reader)


def _named(reader: Reader) -> CallHead:
    """Reads a name, perhaps an id, and what separates them from the arguments."""
    start = reader.at
    while reader.peek() not in "[{":
        reader.at += 1
    name = reader.since(start).strip()
    call_id = None
    if reader.has(_ID):
        start = reader.at
        while reader.peek() != "[":
            reader.at += 1
        call_id = reader.since(start).strip()
    reader.has(_ARGS)
    reader.space()
    if reader.peek() != "{":
        raise NotACall
    return CallHead(require_name(name), call_id)
