"""ParsedChoice: what has come of a choice, as reasoning, content and tool calls."""

from collections.abc import Iterator

from ..messages import TextDelta, unpack_ids
from ..text.answer_parser import AnswerMessage, AnswerParser, content_events
from ..text.machine import Event
from ..text.tokenizer import Tokenizer

_SLICE = 2048  # characters that are parsed at once, or tokens counted: two milliseconds at most


class ParsedChoice:
    """A choice whose text is parsed as it comes; without a `parser` all of it is content.

    `message` is what was taken so far, `reasoning_tokens` the number of tokens of its reasoning."""

    def __init__(self, parser: AnswerParser | None, tokenizer: Tokenizer) -> None:
        self.message = AnswerMessage()
        self.reasoning_tokens = 0
        self._parser = parser
        self._tokenizer = tokenizer

    def take(self, delta: TextDelta) -> Iterator[list[Event]]:
        """The events of `delta`, the next of the choice, part by part: between two parts others may
        have their turn. A part may be empty. All of them must be taken."""
        if self._parser is None:
            events = content_events(delta.text)
            self.message.extend(events)
            yield events
            return
        for start in range(0, len(delta.text), _SLICE):
            events = self._parser.push(delta.text[start : start + _SLICE])
            self.message.extend(events)
            yield events
        if delta.finish is not None:
            events = self._parser.finish()
            self.message.extend(events)
            yield events
        yield from self._count_reasoning(self._parser, delta)

    def _count_reasoning(self, parser: AnswerParser, delta: TextDelta) -> Iterator[list[Event]]:
        """Counts the tokens of the reasoning, with what ends it; gives empty parts only."""
        if parser.in_reasoning:
            self.reasoning_tokens = delta.completion_tokens
            return
        behind = parser.behind_reasoning
        if behind is None or behind > len(delta.text):
            return  # none has ended, or it had before
        left = len(delta.text[len(delta.text) - behind :].encode())
        tokens = 0
        ids = unpack_ids(delta.ids)
        while left > 0 and tokens < len(ids):
            left -= len(self._tokenizer.id_to_bytes(int(ids[-1 - tokens])))
            tokens += 1
            if tokens % _SLICE == 0:
                yield []
        self.reasoning_tokens = delta.completion_tokens - tokens

    @property
    def is_parsed(self) -> bool:
        """Whether there is a parser. Without one `message` is needed of whole answers only."""
        return self._parser is not None

    @property
    def has_calls(self) -> bool:
        """Whether there is a tool call."""
        return bool(self.message.calls)
