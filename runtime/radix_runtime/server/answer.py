"""What the routes that generate share: from requests back to the client."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from ..messages import Call, Generate, TextDelta
from ..text.choices import by_choice
from . import logprob_bound
from .http_call import HttpCall, event, event_pieces
from .labels import Label
from .logprob_bound import check_logprobs
from .protocol import AgentBody, GenerateBody, OpenAIBody
from .submission import Batch, Submission
from .turns import in_turns

_SHORT = 1024  # characters of a piece that is encoded and sent at once


class Answer(ABC):
    """What goes back for one call, whole or as events; a route shapes it.

    `name` is what the client calls the call, `labels` what it calls each request, by rid;
    `request_of[i]` is the request of choice i. `submission` is there once `send` runs. `done` ends
    a stream that is complete."""

    done: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(
        self,
        call: HttpCall,
        body: OpenAIBody | GenerateBody | AgentBody,
        requests: list[Generate],
        name: str,
    ) -> None:
        self.call = call
        self.requests = requests
        self.name = name
        self.labels = {request.rid: f"{name}-{i}" for i, request in enumerate(requests)}
        if len(requests) == 1:
            self.labels = {requests[0].rid: name}
        self.request_of = by_choice(requests)
        self.submission: Submission
        self.is_stream = bool(body.stream)
        self._is_named = body.rid is not None
        self._has_logprobs = any(
            request.return_logprob or request.logprob_start >= 0 for request in requests
        )
        check_logprobs(requests, logprob_bound.MAX_LOGPROBS)
        key = call.caller.key if call.manager.args.cache_salt_per_key else ""
        parts = (body.cache_salt or "", body.extra_key or "", key)
        for request in requests:
            request.stream = self.is_stream
            request.extra_key = parts if any(parts) else None
            request.call = Call(name=requests[0].rid, num_choices=len(self.request_of))

    async def check_constraints(self) -> None:
        """Compiles what the answers must look like. Raises RequestError."""
        for request in self.requests:
            if request.constraint is not None:
                checked = await self.call.manager.grammars.checked(request.constraint)
                request.constraint = checked.constraint
                self.call.warnings += checked.warnings

    async def _submit(self) -> Submission:
        """Sends the requests. Raises RequestError, also if a name that the client has given to one
        is another's."""
        call = self.call
        named = []
        if self._is_named:
            named = [Label(call.caller.key, name) for name in self.labels.values()]
        async with call.manager.names.claimed(named):
            return call.manager.submit(
                self.requests, self.name, self.labels, call.started, call.place
            )

    async def send(self) -> None:
        """Runs the requests and answers the call. Raises RequestError."""
        call = self.call
        await self.check_constraints()
        self.submission = await self._submit()
        with self.submission:
            if not self.is_stream:
                deltas = await self.submission.collect()
                await in_turns(self.digest(deltas))
                await self.answer_with(self.whole(deltas))
                return
            self.submission.deliver = self.deliver
            while batch := await self.submission.next_batch():
                await self.write_events(self.events(batch))
            await call.write(self.tail() + self.done, last=True)

    def deliver(self, index: int, delta: TextDelta) -> bool:
        """Sends the next piece of choice number `index` of a stream, as `events` would, if it is a
        usual one and the client can take it at once. False: nothing was done. See Submission."""
        writer = self.call.chunks
        if writer is None or not writer.takes_more:
            return False
        is_usual = (
            delta.finish is None
            and delta.logprobs is None
            and delta.prompt_logprobs is None
            and len(delta.text) <= _SHORT
        )
        if not is_usual:
            return False
        frames = self.short_frames(index, delta)
        if frames:
            writer.write(frames)
        return True

    async def answer_with(self, value: Any) -> None:
        if self._has_logprobs:
            await self.call.answer_in_pieces(value)
        else:
            await self.call.answer(value)

    async def write_events(self, values: Iterator[dict[str, Any] | None]) -> None:
        """Sends events."""
        encode = event_pieces if self._has_logprobs else self._frames
        await self.call.write_in_slices(encode(values))

    def digest(self, deltas: list[TextDelta]) -> Iterator[object]:
        """Work on a whole answer that takes long: between two steps others have their turn."""
        return iter(())

    @abstractmethod
    def whole(self, deltas: list[TextDelta]) -> Any:
        """The answer that is not streamed; one delta a choice."""

    @abstractmethod
    def events(self, batch: Batch) -> Iterator[dict[str, Any] | None]:
        """What the new pieces of some choices become. None sends nothing; others may have their
        turn."""

    def short_frames(self, index: int, delta: TextDelta) -> bytes:
        """What the events of a usual piece are as bytes; one that neither begins nor ends its
        choice, and is short."""
        return b"".join(self._frames(self.events({index: delta})))

    def tail(self) -> bytes:
        """The frame between the last of a choice and [DONE]."""
        return b""

    def _frames(self, values: Iterator[dict[str, Any] | None]) -> Iterator[bytes]:
        for value in values:
            yield b"" if value is None else self.frame(value)

    def frame(self, value: dict[str, Any]) -> bytes:
        """An event as it is sent."""
        return event(value)
