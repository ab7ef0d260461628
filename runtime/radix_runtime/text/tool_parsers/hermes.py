"""Hermes: a JSON object between <tool_call> and </tool_call>. Qwen2.5 and Qwen3 write it too."""

from ..machine import Reader
from .base import CallHead, JsonCalls, object_end, object_head, optional
from .form import CallForm


class HermesParser(JsonCalls):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""

    form = CallForm(
        opening="<tool_call>",
        call='<tool_call>\n{"name": "{name}", "arguments": ',
        call_end="}\n</tool_call>",
        separator="\n",
    )
    openings = ("<tool_call>",)
    newline = True
    markers = ("<tool_call>", "</tool_call>")

    def _first_head(self, reader: Reader) -> CallHead:
        reader.word("<tool_call>")
        reader.space()
        return object_head(reader, arguments=("arguments", "parameters"))

    def _call_end(self, reader: Reader) -> None:
        object_end(reader)
        optional(reader, "</tool_call>")
