"""Qwen3-Coder: a function and its parameters, each between tags of its own."""

from ..machine import NotACall, Reader
from .base import CallHead, optional, require_name
from .form import CallForm
from .tagged import TaggedCalls


class Qwen3CoderParser(TaggedCalls):
    """<tool_call> <function=NAME> <parameter=KEY> value </parameter> ... </function> </tool_call>,
    a line each. The model leaves <tool_call> out at times."""

    form = CallForm(
        opening="<tool_call>",
        call="<tool_call>\n<function={name}>",
        call_end="\n</function>\n</tool_call>",
        separator="\n",
        key="\n<parameter={key}>\n",
        value_end="</parameter>",
        before_end="\n",
    )
    openings = ("<tool_call>", "<function=")
    newline = True
    markers = ("<tool_call>", "</tool_call>")
    value_end = "</parameter>"
    bare_newline = True

    def _first_head(self, reader: Reader) -> CallHead:
        if reader.has("<tool_call>"):
            reader.space()
        reader.word("<function=")
        return CallHead(require_name(reader.until(">")))

    def _key(self, reader: Reader) -> str | None:
        reader.space()
        if reader.has("</function>"):
            return None
        reader.word("<parameter=")
        key = reader.until(">")
        if not key:
            raise NotACall
        reader.has("\n")
        return key

    def _call_end(self, reader: Reader) -> None:
        optional(reader, "</tool_call>")
