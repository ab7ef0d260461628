"""What the answers of /v1/chat/completions and /v1/completions share."""

import time
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from .. import __version__
from ..messages import FinishReason, Generate, TextDelta, num_ids
from ..text.choices import Scored, num_scored, scored
from .answer import Answer
from .event_template import EventTemplate
from .http_call import HttpCall, event
from .protocol import OpenAIBody, StreamOptions
from .submission import Batch


class OpenAIAnswer(Answer):
    """Choices of one shape and the usage. A prompt counts once in the usage, whatever its n.

    `kind` is the `object` of the answer."""

    def __init__(
        self,
        call: HttpCall,
        body: OpenAIBody,
        requests: list[Generate],
        *,
        name: str,
        kind: str,
    ) -> None:
        super().__init__(call, body, requests=requests, name=name)
        self.tokenizer = call.manager.tokenizer
        self.sampling = requests[0].sampling
        self._options = body.stream_options or StreamOptions()
        self._started: set[int] = set()  # choices of which something was sent
        self._templates: dict[tuple[int, str], EventTemplate] = {}  # of texts, by kind
        self._cached: dict[str, int] = {}  # tokens of a prompt, by rid
        self._completion = [0] * len(self.request_of)  # tokens of a choice
        self._head = {
            "id": self.name,
            "object": kind,
            "created": int(time.time()),
            "model": call.manager.model_name,
            "system_fingerprint": f"radix-{__version__}",
        }

    @abstractmethod
    def choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """The whole choice number `index`, less its index."""

    @abstractmethod
    def chunks(self, index: int, delta: TextDelta, first: bool) -> Iterator[dict[str, Any] | None]:
        """The chunks of choice number `index` that `delta` gives in a stream, less the index.
        `first`: nothing of the choice was sent before. None: see `events`."""

    def whole(self, deltas: list[TextDelta]) -> dict[str, Any]:
        """All choices and the usage."""
        self._count(dict(enumerate(deltas)))
        choices = []
        for index, delta in enumerate(deltas):
            choices.append({"index": index, **self.choice(index, delta)})
        return {**self._head, "choices": choices, "usage": self._usage()}

    def events(self, batch: Batch) -> Iterator[dict[str, Any] | None]:
        """A frame for each chunk of each choice. Warnings go with the first frame."""
        self._count(batch)
        for index, delta in batch.items():
            first = index not in self._started
            self._started.add(index)
            for chunk in self.chunks(index, delta, first):
                if chunk is None:
                    yield None
                    continue
                frame = self._frame(index, chunk)
                if self.call.warnings:
                    frame["warnings"] = self.call.warnings
                    self.call.warnings = []  # only in the first frame
                yield frame

    def _frame(self, index: int, chunk: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [{"index": index, **chunk}],
            **self._usage_so_far(),
        }

    def short_frames(self, index: int, delta: TextDelta) -> bytes:
        """See Answer. Only the last piece of a choice need be counted, unless each event tells the
        usage."""
        if self._options.continuous_usage_stats:
            return super().short_frames(index, delta)
        return self.text_frames(index, delta)

    @abstractmethod
    def text_frames(self, index: int, delta: TextDelta) -> bytes:
        """The `short_frames` of a piece where no event tells the usage."""

    @abstractmethod
    def text_chunk(self, kind: str, text: str) -> dict[str, Any]:
        """The chunk of a text of some kind and nothing else."""

    def chunk_frame(self, index: int, chunk: dict[str, Any]) -> bytes:
        """The event of a chunk of choice number `index`."""
        return event(self._frame(index, chunk))

    def text_frame(self, index: int, kind: str, text: str) -> bytes:
        """The event of a `text_chunk` of choice number `index`."""
        template = self._templates.get((index, kind))
        if template is None:
            template = EventTemplate(
                lambda text: self._frame(index, self.text_chunk(kind, text))
            )
            self._templates[index, kind] = template
        return template.event(text)

    def tail(self) -> bytes:
        """The frame with the usage, if the client asked for it."""
        if not self._options.include_usage:
            return b""
        return event({**self._head, "choices": [], "usage": self._usage()})

    def _usage_so_far(self) -> dict[str, Any]:
        """What a frame of a stream tells of the usage."""
        if self._options.continuous_usage_stats:
            return {"usage": self._usage()}
        if self._options.include_usage:
            return {"usage": None}
        return {}

    def _count(self, batch: Batch) -> None:
        for index, delta in batch.items():
            # The first choice of a prompt to start tells what the cache gave to the prompt; the
            # others find it there by design.
            self._cached.setdefault(self.request_of[index].rid, delta.cached_tokens)
            self._completion[index] = delta.completion_tokens

    def _usage(self) -> dict[str, Any]:
        prompt = sum(num_ids(request.input_ids) for request in self.requests)
        completion = sum(self._completion)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            **self.usage_details(),
        }

    def usage_details(self) -> dict[str, Any]:
        """What else there is to say of the usage."""
        return {}

    def scored_output(self, delta: TextDelta) -> Iterator[tuple[Scored, bytes]]:
        """The tokens of `delta` with logprobs, and the bytes of each that are shown."""
        hidden = None  # nothing is shown of a stop token, which comes last
        if delta.finish is not None and not self.sampling.no_stop_trim:
            hidden = delta.finish.matched
        last = num_scored(delta.logprobs) - 1
        for i, entry in enumerate(scored(delta.logprobs)):
            if i == last and entry.token == hidden:
                yield entry, b""
            else:
                yield entry, self.shown(entry.token)

    def shown(self, token: int) -> bytes:
        """The raw bytes of a token, so that those of all tokens make the text; one that is not
        shown has none."""
        if self.sampling.hides(token, self.tokenizer.special_ids):
            return b""
        return self.tokenizer.id_to_bytes(token)


def finish_fields(finish: FinishReason | None) -> dict[str, Any]:
    """`matched_stop` is the id or the string that ended the choice, else null."""
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish.type, "matched_stop": finish.matched}
