"""Reasoning between <think> and </think>."""

from typing import Literal

from ..machine import Machine, MarkerSearch, NeedMore, NotACall, Reader

_OPEN = "<think>"
_CLOSE = "</think>"
_MOST_SPACE = 4  # characters of whitespace that may come before the opening
# The same as a regex, for grammars: what one of them takes for reasoning, the other must too.
SPACE = f"[\\s\\x1c-\\x1f]{{0,{_MOST_SPACE}}}"

Start = Literal["reasoning", "optional", "content"]


class ThinkParser(Machine):
    """Takes the reasoning out of the beginning of an answer.

    `start` says what the answer begins with: reasoning (with or without a <think>, which may be in
    the prompt), reasoning only behind a <think>, or content: the prompt has closed the reasoning.
    The newlines that templates write around reasoning belong to neither.

    `in_reasoning`: the text so far ends in reasoning. `reasoning_end`: how many characters lie
    before the end of the reasoning, 0 if it has not ended."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        self._start = start
        self._search = MarkerSearch((_CLOSE,), newline=True)
        self.reasoning_end = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends in reasoning. Where it cannot be anything else, what is held
        back at the beginning is reasoning, too."""
        if self._start == "reasoning" and self._state in (self._begin, self._leading):
            return True
        return self._state == self._reasoning

    @property
    def is_done(self) -> bool:
        """Whether no reasoning can follow."""
        return self._state in (self._gap, self._content)

    def _begin(self) -> bool:
        self._state = self._content
        if self._start == "content":
            return True
        try:
            self._read(_opening)
            self._state = self._reasoning
        except NeedMore:
            self._state = self._begin
            return False
        except NotACall:
            if self._start == "reasoning":
                self._state = self._leading
        return True

    def _leading(self) -> bool:
        self._read(_newline)
        self._state = self._reasoning
        return True

    def _reasoning(self) -> bool:
        found = self._search.find(self._text, self._at)
        if found is None:
            end = len(self._text) if self._is_whole else self._search.held(self._text, self._at)
            self._emit("reasoning", end=end)
            return False
        self._emit("reasoning", end=found[0])
        self._emit("markup", "", end=found[1])
        self.reasoning_end = self.position
        self._state = self._gap
        return True

    def _gap(self) -> bool:
        try:
            self._read(_two_newlines)
        except NeedMore:
            return False
        self._state = self._content
        return True

    def _content(self) -> bool:
        self._emit("content", end=len(self._text))
        return False


def _opening(reader: Reader) -> None:
    reader.space(_MOST_SPACE)
    reader.word(_OPEN)
    reader.has("\n")


def _newline(reader: Reader) -> None:
    reader.has("\n")


def _two_newlines(reader: Reader) -> None:
    if reader.has("\n"):
        reader.has("\n")
