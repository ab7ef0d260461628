"""What the routes that generate share: from a body to requests, and back to the client."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import refusal
from ..messages import Call, Generate, TextDelta, num_ids
from ..sampling_params import Ids, SamplingParams
from ..text.choices import by_choice
from .http_call import HttpCall, event, event_pieces, in_slices
from .protocol import GenerateBody, OpenAIBody, Sampling, TemplateOptions
from .submission import Batch, Submission
from .tokenizer_manager import TokenizerManager

MAX_LOGPROBS = 4 << 20  # in the answer of one call: 32 MiB where each is packed with its id
_DONE = b"data: [DONE]\n\n"


def new_request(
    manager: TokenizerManager,
    body: Sampling,
    ids: Ids,
    *,
    param: str,
    names: Mapping[str, str],
) -> Generate:
    """A request that fits. `param` is what the route calls the prompt; `names` translates fields of
    SamplingParams to what it calls them. Raises RequestError."""
    given = {name: getattr(body, name) for name in SamplingParams.__struct_fields__}
    sampling = SamplingParams(**given)
    if isinstance(body.stop, str):
        sampling.stop = [body.stop]
    left_out = body.max_new_tokens is None
    if left_out:
        sampling.max_new_tokens = body.default_length
    return manager.new_request(ids, sampling, param=param, names=names, clip=left_out)


def logprob_values(request: Generate, tokens: int) -> int:
    """The log-probabilities that a request's answer has at most, if each of its choices has so many
    tokens. Each choice repeats those of the prompt."""
    if not request.return_logprob:
        return 0
    if request.logprob_start >= 0:
        tokens += num_ids(request.input_ids) - request.logprob_start
    return request.sampling.n * tokens * (1 + request.top_logprobs)


def clip_logprobs(request: Generate) -> None:
    """Lowers a number of new tokens that nobody asked for to what one answer may have
    log-probabilities of."""
    tokens = request.sampling.max_new_tokens
    assert tokens is not None
    of_token = logprob_values(request, 1) - logprob_values(request, 0)
    if of_token:
        fits = (MAX_LOGPROBS - logprob_values(request, 0)) // of_token
        request.sampling.max_new_tokens = max(1, min(tokens, fits))


def _check_logprobs(requests: Sequence[Generate]) -> None:
    """Raises RequestError if the answer of a call could have too many log-probabilities."""
    values = 0
    for request in requests:
        values += logprob_values(request, request.sampling.max_new_tokens or 0)
    if values > MAX_LOGPROBS:
        raise refusal(
            "invalid_value",
            f"the answer could have {values} log-probabilities, at most {MAX_LOGPROBS} fit: "
            f"ask for {values / MAX_LOGPROBS:.3g} times fewer tokens, alternatives, choices or "
            "prompts",
            "logprobs",
        )


def template_options(
    manager: TokenizerManager, given: TemplateOptions | None, effort: str | None
) -> dict[str, Any]:
    """Variables for the chat template; `effort` comes before that in `given`. One that the template
    does not know is refused unless it asks for what happens anyway."""
    values = msgspec.structs.asdict(given or TemplateOptions())
    if effort:
        values["reasoning_effort"] = effort
    known = manager.template_variables
    options = {}
    for name, value in values.items():
        if name in known:
            if value is not None:
                options[name] = value
        elif value not in (None, False, "none"):
            raise refusal(
                "unsupported_parameter", f"this model's chat template has no {name}", name
            )
    return options


class Answer(ABC):
    """What goes back for one call, whole or as events; a route shapes it.

    `name` is what the client calls the call, `labels` what it calls each request, by rid;
    `request_of[i]` is the request of choice i. `submission` is there once `send` runs."""

    def __init__(
        self,
        call: HttpCall,
        body: OpenAIBody | GenerateBody,
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
        self._stream = bool(body.stream)
        self._has_logprobs = any(request.return_logprob for request in requests)
        _check_logprobs(requests)
        keys = [key for key in (body.cache_salt, body.extra_key) if key]
        for request in requests:
            request.stream = self._stream
            request.extra_key = "\x1f".join(keys) or None
            request.call = Call(name=requests[0].rid, num_choices=len(self.request_of))

    async def send(self) -> None:
        """Runs the requests and answers the call. Raises RequestError."""
        call = self.call
        with call.manager.submit(
            self.requests, self.name, self.labels, call.started
        ) as self.submission:
            if not self._stream:
                await self._answer(self.whole(await self.submission.collect()))
                return
            while batch := await self.submission.next_batch():
                await self._write(self.events(batch))
            await call.write(self.tail() + _DONE, last=True)

    async def _answer(self, value: Any) -> None:
        if self._has_logprobs:
            await self.call.answer_in_pieces(value)
        else:
            await self.call.answer(value)

    async def _write(self, values: Iterator[dict[str, Any]]) -> None:
        """Sends events."""
        if self._has_logprobs:
            async for frames in in_slices(event_pieces(values)):
                if frames:
                    await self.call.write(frames)
            return
        frames = b"".join(event(value) for value in values)
        if frames:
            await self.call.write(frames)

    @abstractmethod
    def whole(self, deltas: list[TextDelta]) -> Any:
        """The answer that is not streamed; one delta a choice."""

    @abstractmethod
    def events(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """What the new pieces of some choices become."""

    def tail(self) -> bytes:
        """The frame between the last of a choice and [DONE]."""
        return b""
