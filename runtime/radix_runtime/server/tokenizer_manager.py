"""TokenizerManager: the only way from HTTP to the engine and back."""

# prompt -> ids (thread pool) -> admission -> Generate -> link -> ... -> handle(TextBatch) ->
# Submission

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from .. import messages as m
from ..config import ServerArgs
from ..errors import RequestError, refusal
from ..hub import DEMO_MODEL_NAME
from ..model_config import ModelConfig
from ..sampling_params import Limits, SamplingParams
from ..text.tokenizer import Tokenizer
from .generation import Choices
from .metrics import Metrics

MAX_PROMPTS = 256
_ABORTS_KEPT = 4096
Batch = dict[int, m.TextDelta]


class Submission(Choices, AbstractContextManager["Submission"]):
    """The requests of one HTTP call and the mailbox of their output. Leaving its `with` block
    aborts the rest."""

    def __init__(
        self, manager: "TokenizerManager", name: str, requests: Sequence[m.Generate], started: float
    ) -> None:
        super().__init__(requests)
        self.name, self.started, self._manager = name, started, manager
        self._error: RequestError | None = None
        self._news = asyncio.Event()

    def add(self, delta: m.TextDelta) -> int:
        self._news.set()
        return super().add(delta)

    def fail(self, error: RequestError) -> None:
        self._error = self._error or error
        self._news.set()

    async def next_batch(self, *, whole: bool = False) -> Batch:
        """New pieces by choice, {} when all have ended; `whole`: all, at the end. Raises
        RequestError, last."""
        while True:
            if self._error is not None and (whole or not self.pieces):
                raise self._error
            if not self.unfinished or (self.pieces and not whole):
                batch, self.pieces = self.pieces, {}
                return batch
            self._news.clear()
            await self._news.wait()

    async def collect(self) -> list[m.TextDelta]:
        return [delta for _, delta in sorted((await self.next_batch(whole=True)).items())]

    def __exit__(self, *exc: object) -> None:
        self._manager.close(self)


@dataclass(slots=True, eq=False)
class OpenRequest:
    """What is kept of a request until its last choice has ended."""

    rid: str
    label: str  # what the client calls it
    submission: Submission
    choices_left: int
    aborted: bool = False
    last_token: dict[int, float] = field(default_factory=dict)  # when it came, by choice


class TokenizerManager:
    """Knows every open request: `accepted == ok + aborted + failed + refused + open` always; all
    maps are empty when nothing is open. Belongs to the event loop's thread. `link.send` never
    blocks; RequestError: it is full."""

    def __init__(
        self,
        args: ServerArgs,
        model: ModelConfig,
        tokenizer: Tokenizer,
        link: m.Outbox,
        defaults: dict[str, Any],
    ) -> None:
        self.args, self.tokenizer, self.sampling_defaults, self._link = (
            args,
            tokenizer,
            defaults,
            link,
        )
        self.limits = Limits(
            args.context_length or model.max_context, model.vocab_size, args.max_choices
        )
        self.model_name = args.served_model_name or args.model_path or DEMO_MODEL_NAME
        self.created = int(time.time())
        self.engine_info: dict[str, Any] = {}
        self.metrics = Metrics()
        self.counts = self.metrics.counts
        self._ready = False
        self.dead: RequestError | None = None  # why, once the engine is gone for good
        self.health: Callable[[], str | None] = lambda: (
            None
        )  # what tells why the engine is not alive; cheap
        self.probe: asyncio.Task[None] | None = None  # of /health_generate
        self._open: dict[str, OpenRequest] = {}
        self._controls: dict[int, asyncio.Future[m.ControlReply]] = {}
        self._aborts: dict[
            str, float
        ] = {}  # when a label was aborted last, for calls whose text is still being read

    # State of the engine ------------------------------------------------------------------

    def set_ready(self, info: Mapping[str, Any]) -> None:
        """The engine takes requests. `info`: `max_total_num_tokens` (of its KV cache),
        `max_context` and more."""
        self.engine_info = dict(info)
        self.limits.max_total_tokens = info.get("max_total_num_tokens")
        self.limits.context_length = info.get("max_context", self.limits.context_length)
        self._ready = True

    def fail_all(self, error: RequestError) -> None:
        """Ends every open request with `error` and refuses all later ones with it."""
        self.dead = self.dead or error
        for request in list(self._open.values()):
            self._fail(request, error)
        for reply in self._controls.values():
            if not reply.done():
                reply.set_exception(error)

    def require_ready(self) -> None:
        """Raises RequestError unless a request would be taken now."""
        if self.dead is not None:
            raise self.dead
        if not self._ready:
            raise RequestError(503, "not_ready", "the server is still loading", retry_after=1)

    # Text to ids --------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model_name, self.args.model_path, "default"):
            raise RequestError(
                404, "model_not_found", f"the model is {self.model_name}", param="model"
            )

    async def encode(
        self, prompt: str | Sequence[Any], param: str, special_tokens: bool = True
    ) -> list[list[int]]:
        """Ids of each prompt: str, [str], [int] or [[int]]. Far too long a text is not read. Raises
        RequestError."""
        prompts: list[Any] = [prompt] if isinstance(prompt, str) else list(prompt)
        kinds = {type(item) for item in prompts}
        if len(kinds) > 1:
            raise refusal("invalid_type", f"{param}: texts, ids and lists of ids are mixed", param)
        if kinds == {int}:
            prompts = [prompts]
        if not prompts or "" in prompts:
            raise refusal("empty_input", f"{param} is empty", param)
        if len(prompts) > MAX_PROMPTS:
            raise refusal("invalid_value", f"at most {MAX_PROMPTS} prompts", param)
        if kinds == {str}:
            for text in prompts:
                self._check_bytes(text, param)
            encode = self.tokenizer.encode
            return await asyncio.to_thread(
                lambda: [encode(text, special_tokens) for text in prompts]
            )
        for ids in prompts:
            self.limits.check_ids(ids, param)
        return prompts

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        def render() -> list[int]:
            text = self.tokenizer.render_chat(messages, **options)
            self._check_bytes(text, "messages")
            return self.tokenizer.encode(text, add_special_tokens=False)

        return await asyncio.to_thread(render)

    async def decode(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return await asyncio.to_thread(
            lambda: [self.tokenizer.decode(ids, skip_special_tokens) for ids in lists]
        )

    def _check_bytes(self, text: str, param: str) -> None:
        longest = self.tokenizer.max_token_bytes * (4 if self.tokenizer.changes_length else 1)
        self.limits.check_length(len(text) // longest, param, known="at least ")

    # Requests -----------------------------------------------------------------------------

    def submit(
        self, requests: list[m.Generate], name: str, labels: dict[str, str], started: float = 0
    ) -> Submission:
        """Sends admitted requests, all or none. No rid was used before, so that what comes late for
        a request which has ended reaches no other; the client knows the call by `name` and a
        request by its label. Raises RequestError."""
        if self.dead is not None:
            raise self.dead
        if len(set(labels.values())) < len(labels) or any(
            r.label in labels.values() for r in self._open.values()
        ):
            raise refusal("invalid_value", "this rid is in use", "rid")
        submission = Submission(self, name, requests, started or time.perf_counter())
        try:
            for request in requests:
                self._link.send(request)
                self._open[request.rid] = OpenRequest(
                    request.rid, labels[request.rid], submission, request.sampling.n
                )
                self.counts.accepted += 1
                if (
                    max(self._aborts.get(n, 0.0) for n in ("", name, labels[request.rid]))
                    > submission.started
                ):
                    self._link.send(m.Abort(request.rid))
        except BaseException:
            self.close(submission)
            raise
        return submission

    async def one_token(self) -> None:
        """Generates it, also before the server is ready. Raises RequestError if none comes."""
        sampling = SamplingParams(
            temperature=0.0, max_new_tokens=1, ignore_eos=True, seed=0
        )  # takes no drawn seed
        request = m.Generate(
            rid := new_id("health-"), m.pack_ids([self.tokenizer.bos_token_id or 0]), sampling
        )
        with self.submit([request], rid, {rid: rid}) as submission:
            await submission.collect()

    def abort(self, label: str) -> int:
        """Ends `label`: a request or an HTTP call, also one not submitted yet; "": all. How many of
        them are open."""
        self._aborts[label] = time.perf_counter()
        if len(self._aborts) > _ABORTS_KEPT:
            del self._aborts[next(iter(self._aborts))]
        found = [r.rid for r in self._open.values() if label in ("", r.label, r.submission.name)]
        for each in found if label else [""]:
            self._link.send(m.Abort(each))
        return len(found)

    async def control(
        self, op: Literal["flush_cache", "stats"], timeout: float = 10.0
    ) -> m.ControlReply:
        """Raises RequestError: engine gone, or `timeout` seconds without an answer (503)."""
        self.require_ready()
        number = secrets.randbits(48)
        reply = self._controls[number] = asyncio.get_running_loop().create_future()
        try:
            self._link.send(m.Control(number, op))
            return await asyncio.wait_for(reply, timeout)
        except asyncio.TimeoutError:
            raise RequestError(503, "engine_timeout", "the engine does not answer") from None
        finally:
            self._controls.pop(number, None)

    # From the engine ----------------------------------------------------------------------

    def handle(self, message: m.Message) -> None:
        """Takes what detokenizer and scheduler send. What was under way when a request was closed
        comes for none."""
        match message:
            case m.TextBatch(deltas):
                now = time.perf_counter()
                for delta in deltas:
                    if request := self._open.get(delta.rid):
                        self._take(request, delta, now)
            case m.RequestFailed(rid, status, code, text, param, wait):
                if request := self._open.get(rid):
                    self._fail(
                        request,
                        RequestError(status, code, text[:300], param=param, retry_after=wait),
                    )
            case m.ControlReply(number):
                if (reply := self._controls.get(number)) and not reply.done():
                    reply.set_result(message)
            case _:
                raise TypeError(f"the API cannot handle {type(message).__name__}")

    def _take(self, request: OpenRequest, delta: m.TextDelta, now: float) -> None:
        if count := len(delta.ids) // 4:
            if not request.last_token:
                self.metrics.first.observe(now - request.submission.started)
            elif delta.choice in request.last_token:
                self.metrics.between.observe((now - request.last_token[delta.choice]) / count)
            request.last_token[delta.choice] = now
        if delta.finish is not None:
            request.choices_left -= 1
            request.aborted |= delta.finish.type == "abort"
            if request.choices_left == 0:
                self._end(request, "aborted" if request.aborted else "ok", now)
        request.submission.add(delta)

    def _fail(self, request: OpenRequest, error: RequestError) -> None:
        refused = (
            error.status < 500 or error.code == "engine_overloaded"
        )  # at once, by the scheduler
        self._end(request, "refused" if refused else "failed", time.perf_counter())
        request.submission.fail(error)

    def _end(
        self, request: OpenRequest, how: Literal["ok", "aborted", "failed", "refused"], now: float
    ) -> None:
        del self._open[request.rid]
        setattr(self.counts, how, getattr(self.counts, how) + 1)
        if how == "ok":
            self.metrics.whole.observe(now - request.submission.started)

    def close(self, submission: Submission) -> None:
        """The client has gone, or one of its requests has failed: the rest is aborted. May be
        called again."""
        for rid in (request.rid for request in submission.requests):
            if request := self._open.get(rid):
                self._end(request, "aborted", time.perf_counter())
                self._link.send(m.Abort(rid))


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
