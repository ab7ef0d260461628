"""TokenizerManager: the only way from HTTP to the engine and back.

    prompt -> ids (thread pool) -> admission -> Generate -> link -> ... -> handle(TextBatch)

It knows every open request: `accepted == ok + aborted + failed + open` at any moment, and all maps
are empty when nothing is open. All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from ..config import ServerArgs
from ..errors import RequestError, refusal
from ..hf import DEMO_MODEL_NAME, GenerationConfig, Tokenizer
from ..messages import (
    Abort,
    Control,
    ControlReply,
    Generate,
    Message,
    RequestFailed,
    TextBatch,
    TextDelta,
    pack_ids,
)
from ..sampling_params import SamplingParams
from .admission import Limits, check_prompt_length
from .metrics import Metrics
from .submission import OpenRequest, Submission

T = TypeVar("T")


class Link(Protocol):
    def send(self, message: Message) -> None:
        """To the scheduler; never blocks. Raises RequestError when it takes no more."""
        ...


class ModelFacts(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...


@dataclass(slots=True)
class Prompt:
    """One request to be: admitted ids and parameters (see admission.admit)."""

    ids: Sequence[int]
    sampling: SamplingParams
    rid: str | None = None
    return_logprob: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0


@dataclass(slots=True)
class Counts:
    """Requests since the start; those that are in none of the last three are open."""

    accepted: int = 0
    ok: int = 0
    aborted: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Phase:
    """Loading, ready or draining; `error` once the engine is gone for good."""

    name: Literal["loading", "ready", "draining"] = "loading"
    error: RequestError | None = None
    info: dict[str, Any] = field(default_factory=dict)


class TokenizerManager:
    def __init__(
        self,
        args: ServerArgs,
        model_config: ModelFacts,
        tokenizer: Tokenizer,
        link: Link,
        *,
        generation: GenerationConfig | None = None,
    ) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.limits = Limits(
            context_length=args.context_length or model_config.max_context,
            vocab_size=model_config.vocab_size,
            max_choices=args.max_choices,
        )
        use_model = args.sampling_defaults == "model" and generation is not None
        self.sampling_defaults = generation.sampling_defaults() if use_model and generation else {}
        self.model_name = args.served_model_name or args.model_path or DEMO_MODEL_NAME
        self.created = int(time.time())
        self.counts = Counts()
        self.metrics = Metrics(self.counts, lambda: len(self._open))
        self._link = link
        self._phase = _Phase()
        self._open: dict[str, OpenRequest] = {}
        self._controls: dict[int, asyncio.Future[ControlReply]] = {}
        self._control_ids = itertools.count(1)
        self._threads = ThreadPoolExecutor(
            min(4, os.cpu_count() or 1), thread_name_prefix="tokenizer"
        )

    # State of the engine ------------------------------------------------------------------

    def set_ready(self, info: Mapping[str, Any]) -> None:
        """The engine takes requests. Of `info`: `max_total_num_tokens` is the size of its KV cache
        and `max_context` the longest sequence."""
        self._phase.info = dict(info)
        tokens = info.get("max_total_num_tokens")
        self.limits.max_total_tokens = None if tokens is None else int(tokens)
        self.limits.context_length = int(info.get("max_context", self.limits.context_length))
        if self._phase.name == "loading":
            self._phase.name = "ready"

    def drain(self) -> None:
        """Takes no new requests; the open ones go on."""
        self._phase.name = "draining"

    def fail_all(self, error: RequestError) -> None:
        """Ends every open request with `error` and refuses all later ones with it."""
        if self._phase.error is None:
            self._phase.error = error
        for request in list(self._open.values()):
            self._fail(request, error)
        for reply in self._controls.values():
            if not reply.done():
                reply.set_exception(error)
        self._controls.clear()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def engine_info(self) -> dict[str, Any]:
        return self._phase.info

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def dead(self) -> bool:
        return self._phase.error is not None

    def require_ready(self) -> None:
        """Raises RequestError unless a request would be taken now."""
        if self._phase.error is not None:
            raise self._phase.error
        if self._phase.name != "ready":
            doing = "shutting down" if self._phase.name == "draining" else "still loading"
            raise RequestError(503, "not_ready", f"the server is {doing}", retry_after=1)

    # Text to ids --------------------------------------------------------------------------

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model_name, self.args.model_path, "default"):
            raise RequestError(
                404, "model_not_found", f"the model is {self.model_name}", param="model"
            )

    async def encode(
        self, texts: Sequence[str], param: str, *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Ids of each text. A text that is too long whatever its tokens are is refused unread."""
        for text in texts:
            if not text:
                raise refusal("empty_input", f"{param} is empty", param)
            self._check_bytes(text, param)
        encode = self.tokenizer.encode
        return await self.in_thread(lambda: [encode(text, add_special_tokens) for text in texts])

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        def render() -> list[int]:
            text = self.tokenizer.render_chat(
                messages, add_generation_prompt=add_generation_prompt, **kwargs
            )
            self._check_bytes(text, "messages")
            return self.tokenizer.encode(text, add_special_tokens=False)

        return await self.in_thread(render)

    def _check_bytes(self, text: str, param: str) -> None:
        longest = self.tokenizer.max_token_bytes * (4 if self.tokenizer.changes_length else 1)
        check_prompt_length(len(text) // longest, self.limits, param, known="at least ")

    # Requests -----------------------------------------------------------------------------

    def submit(
        self,
        prompts: Sequence[Prompt],
        *,
        name: str,
        stream: bool = False,
        extra_key: str | None = None,
        started: float | None = None,
    ) -> Submission:
        """Sends one Generate a prompt, all or none. The caller must read the submission to its
        end or close it. Raises RequestError."""
        self.require_ready()
        alone = len(prompts) == 1
        rids = [p.rid or (name if alone else f"{name}-{i}") for i, p in enumerate(prompts)]
        taken = next((r for i, r in enumerate(rids) if r in self._open or r in rids[:i]), None)
        if taken is not None:
            raise refusal("invalid_value", "this rid is in use", "rid")
        timeout = self.args.request_timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        submission = Submission(name, self._close_submission, started)
        try:
            for rid, prompt in zip(rids, prompts, strict=True):
                self._link.send(_generate(rid, prompt, stream, extra_key, deadline))
                request = submission.add(rid, len(prompt.ids), prompt.sampling.n)
                self._open[rid] = request
                self.counts.accepted += 1
        except BaseException:
            submission.close()
            raise
        return submission

    def abort(self, rid: str) -> int:
        """Asks the engine to end `rid` (a request or a whole HTTP call); its client gets
        finish_reason "abort". Returns how many open requests that concerns."""
        found = [r for r in self._open.values() if rid in (r.rid, r.submission.name)]
        for request in found:
            self._link.send(Abort(request.rid))
        return len(found)

    def abort_all(self) -> int:
        self._link.send(Abort(""))
        return len(self._open)

    async def control(
        self, op: Literal["flush_cache", "stats", "check"], timeout: float = 10.0
    ) -> ControlReply:
        """Raises RequestError: engine gone, or `timeout` seconds without an answer (503)."""
        self.require_ready()
        number = next(self._control_ids)
        reply = asyncio.get_running_loop().create_future()
        self._controls[number] = reply
        try:
            self._link.send(Control(number, op))
            return await asyncio.wait_for(reply, timeout)
        except (asyncio.TimeoutError, TimeoutError):
            raise RequestError(503, "engine_timeout", "the engine does not answer") from None
        finally:
            self._controls.pop(number, None)

    # From the engine ----------------------------------------------------------------------

    def handle(self, message: Message) -> None:
        """Takes what the detokenizer and the scheduler send. Messages of requests that are no
        longer open are what was under way when they were closed."""
        if isinstance(message, TextBatch):
            now = time.perf_counter()
            for delta in message.deltas:
                request = self._open.get(delta.rid)
                if request is not None:
                    self._take(request, delta, now)
        elif isinstance(message, RequestFailed):
            request = self._open.get(message.rid)
            if request is not None:
                self._fail(request, _error_of(message))
        elif isinstance(message, ControlReply):
            reply = self._controls.get(message.id)
            if reply is not None and not reply.done():
                reply.set_result(message)
        else:
            raise TypeError(f"the API cannot handle {type(message).__name__}")

    def _take(self, request: OpenRequest, delta: TextDelta, now: float) -> None:
        self.metrics.observe_delta(request, delta, now)
        if delta.finish is not None:
            request.choices_left -= 1
            request.aborted |= delta.finish.type == "abort"
            if request.choices_left == 0:
                self._end(request, "aborted" if request.aborted else "ok", now)
        request.submission.push(request.offset + delta.choice, delta)

    def _fail(self, request: OpenRequest, error: RequestError) -> None:
        self._end(request, "failed", time.perf_counter())
        request.submission.fail(error)

    def _end(
        self, request: OpenRequest, how: Literal["ok", "aborted", "failed"], now: float
    ) -> None:
        del self._open[request.rid]
        setattr(self.counts, how, getattr(self.counts, how) + 1)
        self.metrics.observe_end(request, now)

    def _close_submission(self, submission: Submission) -> None:
        """The client has gone, or one of its requests has failed: the rest is aborted."""
        now = time.perf_counter()
        for rid in submission.rids:
            request = self._open.get(rid)
            if request is not None and request.submission is submission:
                self._end(request, "aborted", now)
                self._link.send(Abort(rid))


def _generate(
    rid: str, prompt: Prompt, stream: bool, extra_key: str | None, deadline: float | None
) -> Generate:
    return Generate(
        rid=rid,
        input_ids=pack_ids(prompt.ids),
        sampling=prompt.sampling,
        stream=stream,
        return_logprob=prompt.return_logprob,
        logprob_start=prompt.logprob_start,
        top_logprobs=prompt.top_logprobs,
        extra_key=extra_key,
        deadline=deadline,
    )


def _error_of(message: RequestFailed) -> RequestError:
    return RequestError(
        message.status,
        message.code,
        message.message[:300],
        param=message.param,
        retry_after=message.retry_after,
    )


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
