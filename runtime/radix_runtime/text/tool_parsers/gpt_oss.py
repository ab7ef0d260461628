"""gpt-oss: a message to a function, in the format that is named harmony."""

from ..machine import NotACall, Reader
from .base import CallHead, JsonCalls, optional, require_name
from .form import CallForm

_START = "<|start|>assistant"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_TO = " to=functions."


class GptOssParser(JsonCalls):
    """<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>; the
    recipient may stand before the channel. What messages there are besides is the reasoning
    parser's to tell."""

    form = CallForm(
        opening="",
        call=f"{_CHANNEL}commentary to=functions.{{name}} <|constrain|>json{_MESSAGE}",
        call_end="",
        free=f"{_CHANNEL}final{_MESSAGE}",
    )
    openings = (_START, _CHANNEL, _TO)
    markers = (
        "<|start|>",
        _CHANNEL,
        _MESSAGE,
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    )

    def _first_head(self, reader: Reader) -> CallHead:
        reader.has(_START)
        if reader.has(_TO):
            name = reader.until(_CHANNEL).strip()
        else:
            reader.word(_CHANNEL)
            if not reader.has("commentary"):
                reader.word("analysis")
            reader.word(_TO)
            start = reader.at
            while reader.peek() not in " <":
                reader.at += 1
            name = reader.since(start)
        reader.until(_MESSAGE)
        reader.space()
        if reader.peek() != "{":
            raise NotACall
        return CallHead(require_name(name))

    def _call_end(self, reader: Reader) -> None:
        if not optional(reader, "<|call|>"):
            optional(reader, "<|end|>")
