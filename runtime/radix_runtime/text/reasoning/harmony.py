"""The channels of gpt-oss."""

from typing import Literal

from ..machine import Machine, MarkerSearch, NeedMore, NotACall, Reader

_START = "<|start|>assistant"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")


class HarmonyParser(Machine):
    """An answer of gpt-oss is a row of messages, each with a header: those of the channel analysis
    are reasoning, those to a function are left as they stand for the parser of calls, the others
    are content. The prompt ends with the beginning of the first header.

    `reasoning_end`: how many characters lie before the end of the last reasoning."""

    def __init__(self) -> None:
        super().__init__()
        self._ends = MarkerSearch(_ENDS)
        self._kind: Literal["reasoning", "content"] = "content"
        self._to_function = False
        self.reasoning_end = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._state == self._body and self._kind == "reasoning"

    @property
    def is_done(self) -> bool:
        """Whether no reasoning can follow: a message of reasoning may follow any other."""
        return self._state == self._plain

    def _begin(self) -> bool:
        """At a header."""
        reader = Reader(self._text, self._at, is_whole=self._is_whole)
        try:
            header = _header(reader)
        except NeedMore:
            return False
        except NotACall:
            self._state = self._plain
            return True
        self._to_function = " to=" in header
        is_analysis = f"{_CHANNEL}analysis" in header and not self._to_function
        self._kind = "reasoning" if is_analysis else "content"
        if self._to_function:
            self._emit("content", end=reader.at)
        else:
            self._emit("markup", "", end=reader.at)
        self._state = self._body
        return True

    def _body(self) -> bool:
        found = self._ends.find(self._text, self._at)
        if found is None:
            end = len(self._text) if self._is_whole else self._ends.held(self._text, self._at)
            self._emit(self._kind, end=end)
            return False
        self._emit(self._kind, end=found[0])
        if not self._text.startswith("<|start|>", self._at):
            if self._to_function:
                self._emit("content", end=found[1])
            else:
                self._emit("markup", "", end=found[1])
        if self._kind == "reasoning":
            self.reasoning_end = self.position
        self._state = self._begin
        return True

    def _plain(self) -> bool:
        """Not the format: all that follows is content."""
        self._emit("content", end=len(self._text))
        return False


def _header(reader: Reader) -> str:
    """Reads a header, with or without its beginning."""
    start = reader.at
    reader.has(_START)
    if not reader.has(" to="):
        reader.word(_CHANNEL)
    reader.until(_MESSAGE)
    return reader.since(start)
