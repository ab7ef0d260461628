"""MiniMax M2: invocations with named parameters, in one block."""

from ..machine import NotACall, Reader
from .base import CallHead, require_name
from .form import CallForm
from .tagged import TaggedCalls

_BLOCK = "<minimax:tool_call>"
_BLOCK_END = "</minimax:tool_call>"


class MiniMaxM2Parser(TaggedCalls):
    """<invoke name="NAME"> <parameter name="KEY">value</parameter> ... </invoke>, any number of
    them in a block."""

    form = CallForm(
        opening=_BLOCK,
        section=f"{_BLOCK}\n",
        call='<invoke name="{name}">',
        call_end="\n</invoke>\n",
        section_end=_BLOCK_END,
        key='\n<parameter name="{key}">',
        value_end="</parameter>",
    )
    openings = (_BLOCK,)
    newline = True
    markers = (_BLOCK, _BLOCK_END)
    value_end = "</parameter>"

    def _first_head(self, reader: Reader) -> CallHead:
        reader.word(_BLOCK)
        return self._next_head(reader)

    def _next_head(self, reader: Reader) -> CallHead:
        reader.space()
        reader.word("<invoke name=")
        name = reader.until(">").strip('"')
        return CallHead(require_name(name))

    def _key(self, reader: Reader) -> str | None:
        reader.space()
        if reader.has("</invoke>"):
            return None
        reader.word("<parameter name=")
        key = reader.until(">").strip('"')
        if not key:
            raise NotACall
        return key

    def _section_end(self, reader: Reader) -> None:
        reader.space()
        reader.word(_BLOCK_END)
