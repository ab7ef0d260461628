"""DeepSeek V3, R1 and V3.1: a section of calls between markers."""

from ..machine import NotACall, Reader
from .base import CallHead, JsonCalls, optional, require_name
from .form import CallForm

_SECTION = "<｜tool▁calls▁begin｜>"
_SECTION_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


class DeepSeekV31Parser(JsonCalls):
    """V3.1: the name, a separator and the arguments."""

    form = CallForm(
        opening=_SECTION,
        section=_SECTION,
        call=f"{_CALL}{{name}}{_SEPARATOR}",
        call_end=_CALL_END,
        section_end=_SECTION_END,
    )
    openings = (_SECTION,)
    markers = (_SECTION, _SECTION_END, _CALL, _CALL_END, _SEPARATOR)

    def _first_head(self, reader: Reader) -> CallHead:
        reader.word(_SECTION)
        return self._next_head(reader)

    def _next_head(self, reader: Reader) -> CallHead:
        reader.space()
        reader.word(_CALL)
        name = self._name(reader)
        reader.space()
        if reader.peek() != "{":
            raise NotACall
        return CallHead(require_name(name.strip()))

    def _name(self, reader: Reader) -> str:
        """Reads from the beginning of a call to the arguments. Raises NotACall, NeedMore."""
        return reader.until(_SEPARATOR)

    def _section_end(self, reader: Reader) -> None:
        reader.space()
        reader.word(_SECTION_END)

    def _call_end(self, reader: Reader) -> None:
        optional(reader, _CALL_END)


class DeepSeekV3Parser(DeepSeekV31Parser):
    """V3 and R1: a type, a separator, the name, and the arguments as a fenced block."""

    form = CallForm(
        opening=_SECTION,
        section=_SECTION,
        call=f"{_CALL}function{_SEPARATOR}{{name}}\n{_FENCE}json\n",
        call_end=f"\n{_FENCE}{_CALL_END}",
        separator="\n",
        section_end=_SECTION_END,
    )

    def _name(self, reader: Reader) -> str:
        reader.until(_SEPARATOR)
        return reader.until(f"{_FENCE}json")

    def _call_end(self, reader: Reader) -> None:
        optional(reader, _FENCE)
        optional(reader, _CALL_END)
