"""Llama 3: a JSON object alone, or behind <|python_tag|>."""

from ..machine import NeedMore, NotACall, Reader
from .base import CallHead, JsonCalls, object_end, object_head, optional
from .form import CallForm

_TAG = "<|python_tag|>"


class Llama3Parser(JsonCalls):
    """{"name": ..., "parameters": {...}}, several of them with a semicolon between.

    Without the tag an object is a call if it begins the answer and names a tool of the request;
    other answers in JSON are content."""

    form = CallForm(
        opening="", call='{"name": "{name}", "parameters": ', call_end="}", separator="; "
    )
    openings = (_TAG,)
    markers = (_TAG,)

    def _begin(self) -> bool:
        try:
            reader = Reader(self._text, self._at, is_whole=self._is_whole)
            self._begin_call(reader, is_first=False)
        except NeedMore:
            return False
        except NotACall:
            self._state = self._content
        return True

    def _first_head(self, reader: Reader) -> CallHead:
        reader.word(_TAG)
        reader.space()
        return object_head(reader, arguments=("parameters", "arguments"))

    def _next_head(self, reader: Reader) -> CallHead:
        optional(reader, ";")
        if optional(reader, _TAG):
            reader.space()
            return object_head(reader, arguments=("parameters", "arguments"))
        reader.space()
        call = object_head(reader, arguments=("parameters", "arguments"))
        if call.name not in self._tools:
            raise NotACall
        return call

    def _call_end(self, reader: Reader) -> None:
        object_end(reader)
