"""TokenizerManager: the only way from HTTP to the engine and back."""

# prompt -> ids (thread pool) -> admission -> Generate -> link -> ... -> handle(TextBatch) ->
# Submission

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import messages as m
from ..config import ServerArgs
from ..errors import RequestError, refusal
from ..hub import DEMO_MODEL_NAME
from ..model_config import ModelConfig
from ..sampling_params import Ids, Limits, SamplingParams
from ..text.tokenizer import Tokenizer
from .metrics import Metrics, Outcome
from .protocol import MAX_PROMPTS
from .submission import OpenRequest, Submission

_MAX_SHOWN = 100  # characters of a client's name that come back
_ABORTS_KEPT = 4096
_ALL = ""  # the label that stands for every request


class TokenizerManager:
    """Knows every open request: `accepted == ok + aborted + failed + refused + open` always; all
    maps are empty when nothing is open. Belongs to the event loop's thread.

    `link.send` never blocks; it raises RequestError when the link is full. `defaults` are the
    sampling parameters of requests that leave them out. `health` tells why the engine is not alive,
    or None; it is cheap. `dead` is the error that ended the engine for good."""

    def __init__(
        self,
        args: ServerArgs,
        model: ModelConfig,
        tokenizer: Tokenizer,
        link: m.Outbox,
        defaults: dict[str, Any],
    ) -> None:
        self.args = args
        self.tokenizer = tokenizer
        # Characters of text that one token may stand for. Looks at the whole vocabulary: now, and
        # not when the first text comes.
        self._longest_token = tokenizer.max_token_bytes
        if tokenizer.changes_length:
            self._longest_token *= 4
        self.sampling_defaults = defaults
        self.limits = Limits(
            context_length=args.context_length or model.max_context,
            vocab_size=model.vocab_size,
            max_choices=args.max_choices,
        )
        self.model_name = args.served_model_name or args.model_path or DEMO_MODEL_NAME
        self.created = int(time.time())
        self.engine_info: dict[str, Any] = {}
        self.metrics = Metrics(self.model_name)
        self.counts = self.metrics.counts
        self.dead: RequestError | None = None
        self.health: Callable[[], str | None] = lambda: None
        self._ready = False
        self._link = link
        self._probe: asyncio.Task[None] | None = None
        self._open: dict[str, OpenRequest] = {}
        self._controls: dict[int, asyncio.Future[m.ControlReply]] = {}
        # When a label was aborted last, for calls whose text is still being read.
        self._aborts: dict[str, float] = {}

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
        if self.dead is None:
            self.dead = error
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
            raise RequestError(
                status=503,
                code="not_ready",
                message="the server is still loading",
                retry_after=1,
            )

    def require_alive(self) -> None:
        """Raises RequestError 503 unless the engine is alive, ready or not."""
        if self.dead is not None or self.health() is not None:
            raise RequestError(status=503, code="unhealthy", message="the engine is not alive")

    def check_model(self, name: str | None) -> None:
        """Raises RequestError 404 unless `name` means the served model; None does."""
        if name is not None and name not in (self.model_name, self.args.model_path, "default"):
            raise RequestError(
                status=404,
                code="model_not_found",
                message=(
                    f"The model `{name[:_MAX_SHOWN]}` does not exist; "
                    f"this server has `{self.model_name}`"
                ),
                param="model",
            )

    # Text to ids --------------------------------------------------------------------------

    @property
    def template_variables(self) -> frozenset[str]:
        """What the model's chat template can be told; empty without a template."""
        template = self.tokenizer.chat_template
        return frozenset() if template is None else template.variables

    async def encode(
        self, prompt: str | Sequence[Any] | np.ndarray, param: str, special_tokens: bool = True
    ) -> list[Ids]:
        """Ids of each prompt: str, [str], ids or [ids], which are lists or arrays. A text that is
        far too long is not tokenized. Raises RequestError."""
        prompts: list[Any]
        if isinstance(prompt, str | np.ndarray):
            prompts = [prompt]
        else:
            prompts = list(prompt)
        kinds = {type(item) for item in prompts}
        if len(kinds) > 1:
            raise refusal("invalid_type", f"{param}: texts, ids and lists of ids are mixed", param)
        if kinds == {int}:
            prompts = [prompts]
        if not prompts or (kinds == {str} and "" in prompts):
            raise refusal("empty_input", f"{param} is empty", param)
        if len(prompts) > MAX_PROMPTS:
            raise refusal("invalid_value", f"at most {MAX_PROMPTS} prompts", param)
        if kinds == {str}:
            for text in prompts:
                self._check_bytes(text, param)
            return await asyncio.to_thread(self._encode_texts, prompts, special_tokens)
        for ids in prompts:
            self.limits.check_ids(ids, param)
        return prompts

    def _encode_texts(self, texts: Sequence[str], special_tokens: bool) -> list[Ids]:
        """Runs on another thread, which also frees the lists: a list of a million ids takes as long
        to free as to make."""
        encode = self.tokenizer.encode
        return [np.asarray(encode(text, special_tokens), dtype=np.int32) for text in texts]

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of a conversation; `options` are variables of the chat template. Raises
        RequestError."""

        def render() -> list[int]:
            text = self.tokenizer.render_chat(messages, **options)
            self._check_bytes(text, "messages")
            return self.tokenizer.encode(text, add_special_tokens=False)

        return await asyncio.to_thread(render)

    async def decode(self, lists: Sequence[Ids], skip_special_tokens: bool) -> list[str]:
        """The text of each list of ids."""
        return await asyncio.to_thread(
            lambda: [self.tokenizer.decode(ids, skip_special_tokens) for ids in lists]
        )

    def _check_bytes(self, text: str, param: str) -> None:
        self.limits.check_length(len(text) // self._longest_token, param, known="at least ")

    # Requests -----------------------------------------------------------------------------

    def new_request(
        self,
        ids: Ids,
        sampling: SamplingParams,
        *,
        param: str,
        names: Mapping[str, str],
        clip: bool,
    ) -> m.Generate:
        """A request that fits, with a new id and the server's deadline. `param` is what the route
        calls the prompt; `names` and `clip`: see Limits.admit. Raises RequestError."""
        sampling = self.limits.admit(ids, sampling, param, names, clip)
        timeout = self.args.request_timeout
        return m.Generate(
            rid=new_id(""),
            input_ids=m.pack_ids(ids),
            sampling=sampling,
            deadline=time.monotonic() + timeout if timeout else None,
        )

    def submit(
        self, requests: list[m.Generate], name: str, labels: Mapping[str, str], started: float = 0
    ) -> Submission:
        """Sends admitted requests, all or none. Each rid is new, so that what comes late for a
        request which has ended reaches no other. The client knows the call by `name` and a request
        by its label (`labels`: by rid). `started`: when the call came, time.perf_counter(). Raises
        RequestError."""
        if self.dead is not None:
            raise self.dead
        self._check_labels(labels)
        submission = Submission(
            name=name,
            requests=requests,
            started=started or time.perf_counter(),
            close=self.close,
        )
        try:
            for request in requests:
                self._send(request, labels[request.rid], submission)
        except BaseException:
            self.close(submission)
            raise
        return submission

    def _check_labels(self, labels: Mapping[str, str]) -> None:
        new = set(labels.values())
        in_use = {request.label for request in self._open.values()}
        if len(new) < len(labels) or new & in_use:
            raise refusal("invalid_value", "this rid is in use", "rid")

    def _send(self, request: m.Generate, label: str, submission: Submission) -> None:
        self._link.send(request)
        self._open[request.rid] = OpenRequest(
            rid=request.rid,
            label=label,
            submission=submission,
            choices_left=request.sampling.n,
        )
        self.counts.accepted += 1
        self.metrics.prompt_length.observe(m.num_ids(request.input_ids))
        if self._was_aborted((_ALL, submission.name, label), since=submission.started):
            self._link.send(m.Abort(request.rid))

    async def one_token(self) -> None:
        """Generates one token, also before the server is ready. Raises RequestError if none
        comes."""
        rid = new_id("health-")
        request = m.Generate(
            rid=rid,
            input_ids=m.pack_ids([self.tokenizer.bos_token_id or 0]),
            sampling=SamplingParams(
                temperature=0.0,
                max_new_tokens=1,
                ignore_eos=True,
                seed=0,  # draws no random number of the scheduler's
            ),
        )
        with self.submit([request], rid, {rid: rid}) as submission:
            await submission.collect()

    async def shared_probe(self, timeout: float) -> None:
        """`one_token` within `timeout` seconds; callers that come while one is under way share it.
        Raises RequestError, asyncio.TimeoutError."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(asyncio.wait_for(self.one_token(), timeout))
        await asyncio.shield(self._probe)

    def abort(self, label: str) -> int:
        """Ends `label`: a request or an HTTP call, also one not submitted yet; "": all. How many
        requests of it are open."""
        self._aborts[label] = time.perf_counter()
        if len(self._aborts) > _ABORTS_KEPT:
            del self._aborts[next(iter(self._aborts))]
        if label == _ALL:
            self._link.send(m.Abort(""))
            return len(self._open)
        found = [
            request.rid
            for request in self._open.values()
            if label in (request.label, request.submission.name)
        ]
        for rid in found:
            self._link.send(m.Abort(rid))
        return len(found)

    def _was_aborted(self, labels: Iterable[str], *, since: float) -> bool:
        return any(self._aborts.get(label, 0.0) > since for label in labels)

    def close(self, submission: Submission) -> None:
        """The client has gone, or one of its requests has failed: the rest is aborted. May be
        called again."""
        for sent in submission.requests:
            request = self._open.get(sent.rid)
            if request is not None:
                self._end(request, "aborted", time.perf_counter())
                self._link.send(m.Abort(sent.rid))

    async def control(
        self, op: str, result: type[m.Result], *, body: object = None, timeout: float = 10.0
    ) -> m.Result:
        """Asks the scheduler for an operation with the argument `body`; its result, which is of
        type `result`. Raises RequestError: the scheduler's own, or the engine is gone, or has not
        answered within `timeout` seconds (503)."""
        self.require_ready()
        number = secrets.randbits(48)
        reply: asyncio.Future[m.ControlReply] = asyncio.get_running_loop().create_future()
        self._controls[number] = reply
        try:
            self._link.send(m.Control(number, op, body=m.pack_body(body)))
            answer = await asyncio.wait_for(reply, timeout)
        except asyncio.TimeoutError:
            raise RequestError(
                status=503, code="engine_timeout", message="the engine does not answer"
            ) from None
        finally:
            self._controls.pop(number, None)
        return answer.result(result)

    # From the engine ----------------------------------------------------------------------

    def handle(self, message: m.Message) -> None:
        """Takes what detokenizer and scheduler send. What was under way for a request when it was
        closed is dropped."""
        if isinstance(message, m.TextBatch):
            now = time.perf_counter()
            for delta in message.deltas:
                request = self._open.get(delta.rid)
                if request is not None:
                    self._take(request, delta, now)
        elif isinstance(message, m.RequestFailed):
            request = self._open.get(message.rid)
            if request is not None:
                self._fail(request, message.to_error())
        elif isinstance(message, m.ControlReply):
            reply = self._controls.get(message.id)
            if reply is not None and not reply.done():
                reply.set_result(message)
        else:
            raise TypeError(f"the API cannot handle {type(message).__name__}")

    def _take(self, request: OpenRequest, delta: m.TextDelta, now: float) -> None:
        self._time_tokens(request, delta, now)
        if delta.finish is not None:
            self.metrics.output_length.observe(delta.completion_tokens)
            request.choices_left -= 1
            if delta.finish.type == "abort":
                request.aborted = True
            if request.choices_left == 0:
                self._end(request, "aborted" if request.aborted else "ok", now)
        request.submission.add(delta)

    def _time_tokens(self, request: OpenRequest, delta: m.TextDelta, now: float) -> None:
        count = m.num_ids(delta.ids)
        if count == 0:
            return
        if not request.last_token:
            self.metrics.time_to_first_token.observe(now - request.submission.started)
        elif delta.choice in request.last_token:
            self.metrics.inter_token_latency.observe(
                (now - request.last_token[delta.choice]) / count
            )
        request.last_token[delta.choice] = now

    def _fail(self, request: OpenRequest, error: RequestError) -> None:
        # Refused: at once, by the scheduler.
        refused = error.status < 500 or error.code == "engine_overloaded"
        self._end(request, "refused" if refused else "failed", time.perf_counter())
        request.submission.fail(error)

    def _end(self, request: OpenRequest, how: Outcome, now: float) -> None:
        del self._open[request.rid]
        self.counts.end(how)
        if how == "ok":
            self.metrics.request_latency.observe(now - request.submission.started)


def new_id(prefix: str) -> str:
    """A name that nobody can guess, as requests and calls have them."""
    return prefix + secrets.token_hex(12)
