"""SingleAnswer: an answer with one choice, as blocks of reasoning, text and calls."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from ..messages import Generate, TextDelta, num_ids
from ..text.machine import Event
from .answer import Answer
from .http_call import HttpCall
from .json_pieces import to_json
from .parsed_choice import ParsedChoice
from .protocol import AgentBody
from .submission import Batch


class SingleAnswer(Answer):
    """One choice, written block by block: a block ends where an event of another kind comes. The
    whole answer is what the events of a stream make. Events have a name, their `type`."""

    done = b""

    def __init__(
        self,
        call: HttpCall,
        body: AgentBody,
        *,
        request: Generate,
        choice: ParsedChoice,
        name: str,
    ) -> None:
        super().__init__(call, body, requests=[request], name=name)
        self.prompt_tokens = num_ids(request.input_ids)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.parsed = choice
        self._block = ""  # the kind of event that the open block is made of
        self._has_started = False

    # What a route says --------------------------------------------------------------------

    @abstractmethod
    def start(self) -> Iterator[dict[str, Any]]:
        """The events before the first block."""

    @abstractmethod
    def open_block(self, event: Event) -> Iterator[dict[str, Any]]:
        """Begins the block that `event` is the first of."""

    @abstractmethod
    def extend_block(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Appends to the open block, which is of this kind: content, reasoning or call."""

    @abstractmethod
    def close_block(self, kind: str, *, is_cut: bool = False) -> Iterator[dict[str, Any]]:
        """Ends the open block, which is of this kind. `is_cut`: by the length of the answer."""

    @abstractmethod
    def end(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """The events behind the last block; `delta` is the last of the choice."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """The whole answer, once all events have been made."""

    # Answer -------------------------------------------------------------------------------

    def digest(self, deltas: list[TextDelta]) -> Iterator[object]:
        """Makes the events."""
        return self.events({0: deltas[0]})

    def whole(self, deltas: list[TextDelta]) -> Any:
        """What the events make."""
        return self.result()

    def events(self, batch: Batch) -> Iterator[dict[str, Any] | None]:
        """The events of the next piece of the choice."""
        delta = batch[0]
        self.cached_tokens = self.cached_tokens or delta.cached_tokens
        self.completion_tokens = delta.completion_tokens
        if not self._has_started:
            self._has_started = True
            yield from self.start()
        for events in self.parsed.take(delta):
            yield from self._blocks(events)
            yield None
        if delta.finish is not None:
            if self._block:
                yield from self.close_block(self._block, is_cut=delta.finish.type == "length")
            yield from self.end(delta)

    def _blocks(self, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        for event in events:
            if event.kind == "arguments":
                yield from self.extend_block("call", event.text)
                continue
            if event.kind != self._block or event.kind == "call":
                if self._block:
                    yield from self.close_block(self._block)
                self._block = event.kind
                yield from self.open_block(event)
            if event.kind != "call":
                yield from self.extend_block(event.kind, event.text)

    def frame(self, value: dict[str, Any]) -> bytes:
        """An event with its name."""
        name: str = value["type"]
        return b"event: " + name.encode() + b"\ndata: " + to_json(value) + b"\n\n"
