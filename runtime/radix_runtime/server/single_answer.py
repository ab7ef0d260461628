"""SingleAnswer: an answer with one choice, as blocks of reasoning, text and calls."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from ..messages import Call, Generate, TextDelta, num_ids, pack_ids
from ..text.machine import Event
from .answer import Answer
from .http_call import HttpCall, in_turns
from .json_pieces import to_json
from .parsed_choice import ParsedChoice
from .protocol import AgentBody
from .submission import Batch, new_id


class SingleAnswer(Answer):
    """One choice, written block by block: a block ends where an event of another kind comes. The
    whole answer is what the events of a stream make. Events have a name, their `type`.

    Reasoning that is as long as `budget`, in tokens, is closed with the text `closing`, and the
    answer goes on behind it."""

    done = b""

    def __init__(
        self,
        call: HttpCall,
        body: AgentBody,
        *,
        request: Generate,
        choice: ParsedChoice,
        name: str,
        closing: str = "",
        budget: int | None = None,
    ) -> None:
        super().__init__(call, body, requests=[request], name=name)
        self._closing = closing
        self._budget = budget
        self.prompt_tokens = num_ids(request.input_ids)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.parsed = choice
        self._pending = ""  # text that comes before the next piece's
        self._block = ""  # the kind of event that the open block is made of
        self._has_started = False
        self._is_one_request = False

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
    def close_block(self, kind: str) -> Iterator[dict[str, Any]]:
        """Ends the open block, which is of this kind."""

    @abstractmethod
    def end(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """The events behind the last block; `delta` is the last of the choice."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """The whole answer, once all events have been made."""

    # Answer -------------------------------------------------------------------------------

    async def send(self) -> None:
        """Runs the request and answers the call. Raises RequestError."""
        await self.check_constraints()
        async for delta in self._deltas():
            events = self.events({0: delta})
            if self.is_stream:
                await self.write_events(events)
            else:
                await in_turns(events)
        if self.is_stream:
            await self.call.write(self.done, last=True)
        else:
            await self.answer_with(self.result())

    async def _deltas(self) -> AsyncIterator[TextDelta]:
        """The pieces of the choice, of one request or of two."""
        (request,) = self.requests
        most = request.sampling.max_new_tokens or 0
        self._is_one_request = self._budget is None or self._budget >= most
        if self._is_one_request:
            async for delta in self._run(request):
                yield delta
            return
        ids = request.input_ids
        async for delta in self._run(_shortened(request, self._budget)):
            ids += delta.ids
            is_cut = delta.finish is not None and delta.finish.type == "length"
            if is_cut:
                delta.finish = None
            yield delta
            if delta.finish is not None:
                return
        closing = self._close_reasoning()
        used = self._budget + num_ids(closing)
        async for delta in self._run(_shortened(request, max(most - used, 1), ids + closing)):
            delta.completion_tokens += used
            delta.cached_tokens = self.cached_tokens
            yield delta

    async def _run(self, request: Generate) -> AsyncIterator[TextDelta]:
        """The pieces of a request's only choice; a single one if nothing is streamed."""
        call = self.call
        labels = {request.rid: self.name}
        with call.manager.submit(
            [request], self.name, labels, call.started, call.place
        ) as submission:
            if self._is_one_request:
                submission.deliver = self.deliver
            if not self.is_stream:
                (delta,) = await submission.collect()
                yield delta
                return
            while batch := await submission.next_batch():
                yield batch[0]

    def _close_reasoning(self) -> bytes:
        """The ids of what closes reasoning; none if there is none open."""
        if not self.parsed.in_reasoning:
            return b""
        self._pending = self._closing
        tokenizer = self.call.manager.tokenizer
        return pack_ids(tokenizer.encode(self._closing, add_special_tokens=False))

    def whole(self, deltas: list[TextDelta]) -> Any:
        """What the events make."""
        return self.result()

    def events(self, batch: Batch) -> Iterator[dict[str, Any] | None]:
        """The events of the next piece of the choice."""
        delta = batch[0]
        delta.text = self._pending + delta.text
        self._pending = ""
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
                yield from self.close_block(self._block)
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


def _shortened(request: Generate, tokens: int, ids: bytes | None = None) -> Generate:
    """The request with so many new tokens, and another prompt if `ids` are given."""
    rid = new_id("")
    return msgspec.structs.replace(
        request,
        rid=rid,
        input_ids=request.input_ids if ids is None else ids,
        sampling=msgspec.structs.replace(request.sampling, max_new_tokens=tokens),
        call=Call(name=rid, num_choices=1),
    )
