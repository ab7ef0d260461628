"""GLM 4.5 and later: a name, then keys and values between tags."""

from ..machine import NotACall, Reader
from .base import CallHead, require_name
from .form import CallForm
from .tagged import TaggedCalls

_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_KEY = "<arg_key>"


class Glm45Parser(TaggedCalls):
    """<tool_call>NAME <arg_key>key</arg_key> <arg_value>value</arg_value> ... </tool_call>, a line
    each or without whitespace."""

    form = CallForm(
        opening=_CALL,
        call=f"{_CALL}{{name}}",
        call_end=f"\n{_CALL_END}",
        separator="\n",
        key=f"\n{_KEY}{{key}}</arg_key>\n<arg_value>",
        value_end="</arg_value>",
    )
    openings = (_CALL,)
    newline = True
    markers = (_CALL, _CALL_END, _KEY, "</arg_key>", "<arg_value>", "</arg_value>")
    value_end = "</arg_value>"

    def _first_head(self, reader: Reader) -> CallHead:
        reader.word(_CALL)
        name = require_name(reader.until("<").strip())
        reader.at -= 1
        end = reader.at
        if not reader.has(_KEY):
            reader.word(_CALL_END)
            if name not in self._tools:  # a name alone is not enough
                raise NotACall
        reader.at = end
        return CallHead(name)

    def _key(self, reader: Reader) -> str | None:
        reader.space()
        if reader.has(_CALL_END):
            return None
        reader.word(_KEY)
        key = reader.until("</arg_key>")
        reader.space()
        reader.word("<arg_value>")
        if not key:
            raise NotACall
        return key
