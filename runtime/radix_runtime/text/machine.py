"""What parsers of model text are made of: events, a state machine, a reader that looks ahead."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

MAX_HEAD = 512  # characters of a call that are held until it is known to be one

T = TypeVar("T")


class Event(NamedTuple):
    """A piece of an answer.

    `kind`: `content` and `reasoning` are text for the user; `call` begins a tool call, `text` is
    its name and `call_id` the id that the model gave it, if it did; `arguments` is more of the JSON
    text of the last call's arguments; `markup` is none of these.

    `raw` is the part of the model's text that the event stands for: those of all events together
    are the text, byte for byte."""

    kind: Literal["content", "reasoning", "call", "arguments", "markup"]
    text: str
    raw: str
    call_id: str | None = None


class Parser(Protocol):
    """Text in, events out. The events of a text do not depend on how it is cut into pieces, but for
    where a run of events of one kind is cut."""

    def push(self, text: str) -> list[Event]:
        """The events that are certain after `text`, which follows what was pushed before."""

    def finish(self) -> list[Event]:
        """The rest: nothing follows."""


class NeedMore(Exception):
    """What follows decides; not raised at the end of the text."""


class NotACall(Exception):
    """The text at the reader is not what was looked for."""


class CutShort(NotACall):
    """The whole text ends before what was looked for is complete."""


class Reader:
    """Looks ahead in a text from `at` on, which moves. At most MAX_HEAD characters are looked at.

    The methods raise NeedMore where more text may change the answer (never if the text `is_whole`),
    NotACall where none can."""

    def __init__(self, text: str, at: int, *, is_whole: bool) -> None:
        self._text = text
        self._is_whole = is_whole
        self._limit = at + MAX_HEAD
        self.at = at

    def peek(self) -> str:
        """The next character. At the end of a whole text NotACall."""
        if self.at < len(self._text) and self.at < self._limit:
            return self._text[self.at]
        raise self._short()

    def space(self, most: int = MAX_HEAD) -> None:
        """Skips whitespace, `most` characters of it."""
        end = self.at + most
        while self.at < min(end, len(self._text)) and self._text[self.at].isspace():
            self.at += 1
            if self.at >= self._limit:
                raise NotACall

    def word(self, word: str) -> None:
        """Skips `word`."""
        found = self._text[self.at : min(self.at + len(word), self._limit)]
        if found == word:
            self.at += len(word)
        elif word.startswith(found):
            raise self._short()
        else:
            raise NotACall

    def has(self, word: str) -> bool:
        """Whether `word` follows; if so it is skipped."""
        try:
            self.word(word)
        except NotACall:
            return False
        return True

    def until(self, end: str) -> str:
        """The text before `end`; both are skipped."""
        stop = self._text.find(end, self.at, self._limit)
        if stop < 0:
            raise self._short()
        found = self._text[self.at : stop]
        self.at = stop + len(end)
        return found

    def since(self, start: int) -> str:
        """The text from `start` up to here."""
        return self._text[start : self.at]

    def string(self) -> str:
        """The value of a JSON string."""
        start = self.at
        self.word('"')
        while (char := self.peek()) != '"':
            self.at += 1
            if char == "\\":
                self.peek()
                self.at += 1
        self.at += 1
        try:
            value = json.loads(self.since(start))
        except ValueError:
            raise NotACall from None
        assert isinstance(value, str)
        return value

    def end(self) -> None:
        """Passes at the end of a whole text."""
        if self.at < len(self._text) or not self._is_whole:
            self.peek()
            raise NotACall

    def _short(self) -> Exception:
        """What is wrong where the text ends too early."""
        if len(self._text) >= self._limit:
            return NotACall()
        return CutShort() if self._is_whole else NeedMore()


class Machine(ABC):
    """A parser that is in one state at a time. A state is a method that consumes text and returns
    True, or False if it cannot go on without more."""

    # `_text[_at:]` is what has not been consumed. Positions move within a push, and the text is cut
    # once at its end: a push takes no longer than its text and what was held back.

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._cut = 0  # characters of the text before `_text`
        self._is_whole = False
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._begin

    def push(self, text: str) -> list[Event]:
        """See Parser."""
        self._text = self._text[self._at :] + text
        self._cut += self._at
        self._at = 0
        return self._run()

    @property
    def position(self) -> int:
        """How many characters have been consumed."""
        return self._cut + self._at

    def finish(self) -> list[Event]:
        """See Parser."""
        self._is_whole = True
        return self._run()

    @abstractmethod
    def _begin(self) -> bool:
        """The first state."""

    def _run(self) -> list[Event]:
        while (self._at < len(self._text) or self._is_whole) and self._state():
            pass
        events = self._events
        self._events = []
        return events

    def _read(self, read: Callable[[Reader], T]) -> T:
        """What `read` finds ahead, which is consumed as markup unless it raises."""
        reader = Reader(self._text, self._at, is_whole=self._is_whole)
        value = read(reader)
        self._emit("markup", "", end=reader.at)
        return value

    def _emit(
        self,
        kind: Literal["content", "reasoning", "call", "arguments", "markup"],
        text: str | None = None,
        *,
        end: int,
        call_id: str | None = None,
    ) -> None:
        """Consumes the text up to `end` as one event; without `text` it is that text itself."""
        raw = self._text[self._at : end]
        self._at = end
        if text is None:
            text = raw
        if raw or text:
            self._events.append(Event(kind=kind, text=text, raw=raw, call_id=call_id))


class MarkerSearch:
    """Finds the first of some markers in a text that comes piece by piece. With `newline` one
    newline before a marker belongs to it."""

    def __init__(self, markers: Sequence[str], *, newline: bool = False) -> None:
        self._newline = newline
        self._text = ""
        self._next = dict.fromkeys(markers, 0)  # where each was found in `_text`; its length: not
        self._prefixes = {marker[:k] for marker in markers for k in range(1, len(marker))}
        if newline:
            self._prefixes |= {"\n", *(f"\n{prefix}" for prefix in self._prefixes)}
        self._longest = max(map(len, self._prefixes))
        self._first = {prefix[0] for prefix in self._prefixes}

    def find(self, text: str, at: int) -> tuple[int, int] | None:
        """Where the first marker from `at` on begins, with its newline, and where it ends."""
        if text is not self._text:
            self._text = text
            self._next = dict.fromkeys(self._next, -1)
        for marker, found in self._next.items():
            if found < at:  # no marker is looked for twice in the same part of a text
                found = text.find(marker, at)
                self._next[marker] = len(text) if found < 0 else found
        marker = min(self._next, key=self._next.__getitem__)
        start = self._next[marker]
        if start == len(text):
            return None
        end = start + len(marker)
        if self._newline and start > at and text[start - 1] == "\n":
            start -= 1
        return start, end

    def held(self, text: str, at: int) -> int:
        """The end of what is certain to lie before a marker: behind it one may begin."""
        start = max(at, len(text) - self._longest)
        tail = text[start:]
        for skipped, char in enumerate(tail):
            if char in self._first and tail[skipped:] in self._prefixes:
                return start + skipped
        return len(text)
