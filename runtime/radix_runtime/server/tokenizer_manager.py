"""TokenizerManager: the only way from HTTP to the engine and back."""

# prompt -> ids (thread pool) -> admission -> Generate -> link -> ... -> handle(TextBatch) ->
# Submission

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import messages as m
from ..channel import Outbox
from ..config import ServerArgs
from ..errors import RequestError
from ..grammar.service import Grammars
from ..hub import DEMO_MODEL_NAME
from ..model_config import ModelConfig
from ..sampling_params import Ids, Limits, SamplingParams
from ..text.answer_format import find_format
from ..text.tokenizer import Tokenizer
from .admission import Admission, Place
from .drain import Drain
from .labels import Label
from .metrics import Figures, Metrics, Outcome
from .names import Names
from .questions import Questions
from .request_rules import RequestRules
from .shared_numbers import READY, SharedNumbers
from .siblings import Siblings
from .submission import OpenRequest, Submission, new_id
from .text_work import TextWork

_PROBE = "a"  # what /health_generate continues
_SLICE_SECONDS = 0.002  # that messages are handled without a pause
_MAX_SHOWN = 100  # characters of a client's name that come back


class TokenizerManager:
    """Knows every open request: `accepted == ok + aborted + failed + refused + open` always; all
    maps are empty when nothing is open. Belongs to the event loop's thread.

    `link.send` never blocks; it raises RequestError when the link is full. `defaults` are the
    sampling parameters of requests that leave them out. `health` tells why the engine is not alive,
    or None; it is cheap. `dead` is the error that ended the engine for good. `text` turns text into
    ids and back. `format`: how the model writes answers. `grammars` compiles constraints. `numbers`
    and `siblings` are of all API processes of the server, `names` what clients call requests."""

    def __init__(
        self,
        args: ServerArgs,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        link: Outbox,
        defaults: dict[str, Any],
        grammars: Grammars,
        numbers: SharedNumbers,
    ) -> None:
        self.args = args
        self.grammars = grammars
        self.sampling_defaults = defaults
        self.format = find_format(args, tokenizer)
        self.limits = Limits(
            context_length=args.context_length or model.max_context,
            vocab_size=model.vocab_size,
            max_choices=args.max_choices,
        )
        self.text = TextWork(tokenizer, self.limits)
        self.model_name = args.served_model_name or args.model_path or DEMO_MODEL_NAME
        self.created = int(time.time())
        self.engine_info: dict[str, Any] = {}
        self.numbers = numbers
        self.admission = Admission(args, self.numbers)
        self.drain = Drain(args.drain_delay, self.numbers)
        self.metrics = Metrics(self.model_name, self.admission)
        self.counts = self.metrics.counts
        self.dead: RequestError | None = None
        self.health: Callable[[], str | None] = lambda: None
        self._link = link
        self._probe: asyncio.Task[None] | None = None
        self._open: dict[str, OpenRequest] = {}
        self._controls: Questions[m.ControlReply] = Questions()
        self.siblings = Siblings(
            number=self.numbers.process, count=self.numbers.processes, link=link
        )
        self.siblings.register("figures", None, lambda _: self.metrics.figures())
        self.names = Names(self.siblings, link)
        self._labels = self.names.labels
        self._with_news: set[Submission] = set()  # whose readers are to wake up
        # Tasks of calls whose text is still being read: an end does not wait for it.
        self.unsubmitted: set[asyncio.Task[None]] = set()

    # State of the engine ------------------------------------------------------------------

    def set_ready(self, info: Mapping[str, Any]) -> None:
        """The engine takes requests of this process. `info`: `max_total_num_tokens` (of its KV
        cache), `max_context` and more."""
        self.engine_info = dict(info)
        self.limits.max_total_tokens = info.get("max_total_num_tokens")
        self.limits.context_length = info.get("max_context", self.limits.context_length)
        self.admission.set_running(info.get("max_running_requests") or self.args.running_limit)
        self.numbers.publish(READY, 1)

    def fail_all(self, error: RequestError) -> None:
        """Ends every open request with `error` and refuses all later ones with it."""
        if self.dead is None:
            self.dead = error
        for request in list(self._open.values()):
            self._fail(request, error)
        for task in self.unsubmitted:
            task.cancel()
        self._controls.fail_all(error)
        self.siblings.fail_all(error)

    def require_ready(self) -> None:
        """Raises RequestError unless all API processes take requests: a client may reach any."""
        if self.dead is not None:
            raise self.dead
        if self.numbers.everywhere(READY) < self.numbers.processes:
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
        """Raises RequestError 404 unless `name` means the served model; None and its path do."""
        if name is None or name in (self.model_name, "default"):
            return
        if self.args.model_path is None or Path(name) != Path(self.args.model_path):
            raise RequestError(
                status=404,
                code="model_not_found",
                message=(
                    f"The model `{name[:_MAX_SHOWN]}` does not exist; "
                    f"this server has `{self.model_name}`"
                ),
                param="model",
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError where the server takes token ids only."""
        return self.text.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations are taken."""
        return self.text.has_chat_template

    # Requests -----------------------------------------------------------------------------

    @property
    def rules(self) -> RequestRules:
        """What the requests of this process are made by."""
        return RequestRules(
            limits=self.limits,
            defaults=self.sampling_defaults,
            timeout=self.args.request_timeout,
            has_tokenizer=self.text.has_tokenizer,
            api=self.numbers.process,
        )

    def submit(
        self,
        requests: list[m.Generate],
        name: str,
        labels: Mapping[str, str],
        started: float = 0,
        place: Place | None = None,
    ) -> Submission:
        """Sends admitted requests, all or none. Each rid is new, so that what comes late for a
        request which has ended reaches no other. The client knows the call by `name` and a request
        by its label (`labels`: by rid). `started`: when the call came, time.perf_counter();
        `place`: what the call holds of the queue. Raises RequestError."""
        if self.dead is not None:
            raise self.dead
        self.unsubmitted -= {asyncio.current_task()}
        key = "" if place is None else place.key
        label_of = {rid: Label(key, label) for rid, label in labels.items()}
        self._labels.check_new(list(label_of.values()))
        if place is not None:
            place.admit(requests)
        submission = Submission(
            name=name,
            requests=requests,
            started=started or time.perf_counter(),
            close=self.close,
        )
        try:
            for request in requests:
                self._send(request, label_of[request.rid], submission)
        except BaseException:
            self.close(submission)
            raise
        return submission

    def _send(self, request: m.Generate, label: Label, submission: Submission) -> None:
        self._link.send(request)
        work = self.admission.speed.expected(request)
        self._open[request.rid] = OpenRequest(
            rid=request.rid,
            label=label,
            submission=submission,
            choices_left=request.sampling.n,
            first_choice=submission.number_of(request.rid),
            prompt_tokens=m.num_ids(request.input_ids),
            waiting_tokens=work,
        )
        self._labels.add(request.rid, label, submission.name)
        self.admission.begin_work(work, time.perf_counter())
        self.counts.accepted += 1
        self.metrics.prompt_length.observe(m.num_ids(request.input_ids))
        if self._labels.was_aborted(label, submission.name, since=submission.started):
            self._link.send(m.Abort(request.rid))

    async def one_token(self) -> None:
        """Generates one token, after a text where texts are taken; also before the server is ready.
        Raises RequestError if none comes."""
        rid = new_id("health-")
        ids: Ids = [0]
        if self.text.has_tokenizer:
            (ids,) = await self.text.encode(_PROBE, "text")
        request = m.Generate(
            rid=rid,
            input_ids=m.pack_ids(ids),
            sampling=SamplingParams(
                temperature=0.0,
                max_new_tokens=1,
                ignore_eos=True,
                seed=0,  # draws no random number of the scheduler's
            ),
            api=self.numbers.process,
        )
        with self.submit([request], rid, {rid: rid}) as submission:
            await submission.collect()

    async def shared_probe(self, timeout: float) -> None:
        """`one_token` within `timeout` seconds; callers that come while one is under way share it.
        Raises RequestError, asyncio.TimeoutError."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(asyncio.wait_for(self.one_token(), timeout))
        await asyncio.shield(self._probe)

    async def figures(self) -> Figures:
        """What all API processes have counted. Raises RequestError 503 if one does not answer:
        without its part the sums would fall, which Prometheus takes for a restart."""
        siblings = await self.siblings.ask("figures", None, Figures)
        if len(siblings) < self.siblings.count - 1:
            text = "an API process does not answer"
            raise RequestError(status=503, code="unhealthy", message=text)
        return self.metrics.total(siblings.values())

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
        packed = m.pack_body(body)

        def send(number: int) -> None:
            self._link.send(m.Control(number, op, body=packed, api=self.numbers.process))

        try:
            answer = await self._controls.ask(send, timeout)
        except asyncio.TimeoutError:
            raise RequestError(
                status=503, code="engine_timeout", message="the engine does not answer"
            ) from None
        return answer.result(result)

    # From the engine ----------------------------------------------------------------------

    async def handle_all(self, messages: Sequence[m.Message]) -> None:
        """Takes messages that have arrived together; now and then the event loop has its turn. Of
        the pieces of a choice the first may be sent at once; the others become one, so that a
        process which has fallen behind sends fewer events."""
        now = time.perf_counter()
        end = now + _SLICE_SECONDS
        for message in messages:
            self._handle(message, now)
            if time.perf_counter() >= end:
                await asyncio.sleep(0)
                end = time.perf_counter() + _SLICE_SECONDS
        self._wake_readers()

    def handle(self, message: m.Message) -> None:
        """Takes a message that has arrived alone."""
        self._handle(message, time.perf_counter())
        self._wake_readers()

    def _wake_readers(self) -> None:
        for submission in self._with_news:
            submission.wake()
        self._with_news.clear()

    def _handle(self, message: m.Message, now: float) -> None:
        """Takes what detokenizer and scheduler send; those that came together have the same `now`
        (time.perf_counter()). What was under way for a request when it was closed is dropped."""
        if isinstance(message, m.TextBatch):
            done = 0
            for delta in message.deltas:
                request = self._open.get(delta.rid)
                if request is not None:
                    done += self._take(request, delta, now)
            self.admission.note_work(done, now)
        elif isinstance(message, m.RequestFailed):
            request = self._open.get(message.rid)
            if request is not None:
                self._fail(request, message.to_error())
        elif isinstance(message, m.ControlReply):
            self._controls.answer(message.id, message)
        elif isinstance(message, m.SiblingCall | m.SiblingReply):
            self.siblings.handle(message)
        else:
            raise TypeError(f"the API cannot handle {type(message).__name__}")

    def _take(self, request: OpenRequest, delta: m.TextDelta, now: float) -> int:
        """How many tokens of work are done with this delta."""
        count = m.num_ids(delta.ids)
        done = count
        if request.waiting_tokens:
            done += request.prompt_tokens
            self._no_longer_waits(request)
        last = request.last_token.get(delta.choice)
        if last is None:
            self._time_start(request, delta, now)
        elif count:
            self.metrics.inter_token_latency.observe((now - last) / count)
        if count:
            request.last_token[delta.choice] = now
        if delta.finish is not None:
            self.metrics.output_length.observe(delta.completion_tokens)
            self.admission.speed.note_answer(delta.completion_tokens)
            request.choices_left -= 1
            if delta.finish.type == "abort":
                request.aborted = True
            if request.choices_left == 0:
                self._end(request, "aborted" if request.aborted else "ok", now)
        submission = request.submission
        is_sent = submission.take(request.first_choice + delta.choice, delta, at_once=last != now)
        if not is_sent:
            self._with_news.add(submission)
        return done

    def _no_longer_waits(self, request: OpenRequest) -> None:
        self.admission.end_wait(request.waiting_tokens)
        request.waiting_tokens = 0

    def _time_start(self, request: OpenRequest, delta: m.TextDelta, now: float) -> None:
        """Notes what came before the first tokens of a choice."""
        if delta.queue_seconds is not None:
            self.metrics.queue_time.observe(delta.queue_seconds)
        if delta.ids and not request.last_token:
            self.metrics.time_to_first_token.observe(now - request.submission.started)

    def _fail(self, request: OpenRequest, error: RequestError) -> None:
        # Refused: at once, by the scheduler.
        refused = error.status < 500 or error.code == "engine_overloaded"
        self._end(request, "refused" if refused else "failed", time.perf_counter())
        request.submission.fail(error)

    def _end(self, request: OpenRequest, how: Outcome, now: float) -> None:
        del self._open[request.rid]
        self._labels.remove(request.rid, request.label, request.submission.name)
        self._no_longer_waits(request)
        if not self._open:
            self.admission.pause(now)
        self.counts.end(how)
        if how == "ok":
            self.metrics.request_latency.observe(now - request.submission.started)
