"""The loop of an engine without a server: requests in, results out, by whichever thread waits."""

import asyncio
import logging
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from .channel import LocalChannel
from .config import ServerArgs
from .engine.executor import LocalExecutor, create_executor
from .errors import EngineDeadError
from .grammar.service import Grammars
from .messages import (
    Abort,
    Message,
    RequestFailed,
    TextBatch,
    TextDelta,
    TextStop,
    num_ids,
    unpack_ids,
)
from .model_config import ModelConfig
from .offline_requests import RequestBatch
from .scheduler.scheduler import Scheduler
from .scheduler.step_log import StepLog
from .signals import interrupts_held
from .start_log import pool_warning
from .text.choices import Choices
from .text.detokenizer import Detokenizer
from .text.sglang_output import sglang_output
from .text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_IDLE_WAIT = 0.05  # seconds until an idle engine looks for messages again

Output = dict[str, Any]
# Outputs that have grown; the error that ended a call; None: all choices have ended.
News = list[Output] | Exception | None


class Call(Choices):
    """The choices of one call, written by whichever thread pumps.

    `is_single`: one prompt with one choice, whose output stands for itself and not in a list.
    """

    def __init__(self, batch: RequestBatch) -> None:
        super().__init__(batch.requests)
        self.is_single = batch.is_single and self.unfinished == 1
        self.error: Exception | None = None
        self.grown: set[int] = set()  # the choices of which the caller has not seen the last piece
        self._ids: dict[int, list[int]] = defaultdict(list)  # of all pieces of a choice
        # One object for each token id: outputs have copies of these lists, and a copy counts a
        # reference to each of its objects, which had better lie in the cache.
        self._tokens: dict[int, int] = {}
        self._arrived: dict[int, float] = {}  # when the last piece came
        self._started = time.monotonic()

    def take(self, delta: TextDelta, now: float) -> None:
        """Takes ownership of `delta`, which came at `now`, time.monotonic()."""
        new = _ids(delta.ids)
        delta.ids = b""  # they are kept as a list: bytes would be copied each time they grow
        choice = self.add(delta)
        self._ids[choice].extend(map(self._tokens.setdefault, new, new))
        self._arrived[choice] = now
        self.grown.add(choice)

    def take_grown(self) -> list[int]:
        """The choices that have grown since the last call, in order."""
        grown = sorted(self.grown)
        self.grown.clear()
        return grown

    def output(self, choice: int) -> Output:
        """The choice as far as it has come, in SGLang's shape, with its number where there are
        others."""
        piece = self.pieces[choice]
        if self.prompt_logprobs:
            piece.prompt_logprobs = self.prompt_logprobs.get(choice)
        output = sglang_output(
            self.request_of[choice],
            piece,
            self._ids[choice].copy(),
            self._arrived[choice] - self._started,
            tokenizer=None,
        )
        if not self.is_single:
            output["index"] = choice
        return output

    def result(self) -> Output | list[Output]:
        """What `Engine.generate` gives once all choices have ended."""
        outputs = [self.output(choice) for choice in sorted(self.pieces)]
        if self.is_single:
            return outputs[0]
        for output in outputs:
            del output["index"]
        return outputs


def _ids(packed: bytes) -> list[int]:
    if num_ids(packed) == 1:  # nearly always, of a stream: quicker than by an array
        return [int.from_bytes(packed, "little", signed=True)]
    return unpack_ids(packed).tolist()


class _Watched(NamedTuple):
    """A call that coroutines wait for; `notify` takes its news on any thread."""

    call: Call
    notify: Callable[[News], None]


class EngineLoop:
    """Scheduler and detokenizer in the caller's process. A thread that waits for its call pumps
    them, and so advances the calls of others; one thread pumps for all coroutines.

    `executor` runs the steps. Raises ConfigError for what cannot work, and EngineDeadError from
    every call once the engine has died."""

    def __init__(
        self,
        args: ServerArgs,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        eos_ids: Sequence[int],
    ) -> None:
        self._watched: dict[int, _Watched] = {}  # by the id of the call
        self._watcher: threading.Thread | None = None  # pumps while anything is watched
        self._watch_lock = threading.Lock()  # held to read or change these two
        self._lock = threading.Lock()  # held by the thread that pumps
        self._dead: str | None = None  # why the engine has died
        self._open: dict[str, Call] = {}  # by request id
        step_log = StepLog(args.trace)
        self.executor = create_executor(args, config)
        warning = pool_warning(
            self.executor.num_pages * self.executor.page_size, self.executor.max_context
        )
        if warning is not None:
            log.warning("%s", warning)
        # Called once: by `shutdown`, with the last reference, or at exit. Not in a forked process:
        # threads and other ranks are its parent's.
        self._grammars = Grammars(
            args,
            tokenizer,
            vocab_size=config.vocab_size,
            eos_ids=eos_ids,
            mask_rows=self.executor.max_rows * self.executor.max_samples,
        )
        self._pid = os.getpid()
        self._close = weakref.finalize(self, _close, self.executor, self._grammars, step_log)
        os.register_at_fork(after_in_child=self._close.detach)
        self._inbox = LocalChannel()
        self._results = LocalChannel()
        tokens = LocalChannel()
        self._scheduler = Scheduler(
            args,
            self.executor,
            inbox=self._inbox,
            outbox=tokens,
            eos_ids=eos_ids,
            make_masks=self._grammars.start_masker,
        )
        self._scheduler.step_log = step_log
        self._detokenizer = Detokenizer(tokenizer, inbox=tokens, outbox=self._results)

    # Threads ------------------------------------------------------------------------------

    def _advance(self, call: Call) -> Generator[list[int], None, None]:
        """Works until `call` is done and yields the choices that have grown, in order, whenever
        there are any. Closed early, it aborts what is unfinished."""
        try:
            with self._turn():
                self._begin(call)
            while call.unfinished or call.grown:  # another thread may have brought it to its end
                with self._turn():
                    if call.unfinished and not call.error:
                        self._pump()
                    grown = call.take_grown()
                if call.error is not None:
                    raise call.error
                if grown:
                    yield grown
        finally:
            with interrupts_held():
                self._end(call)

    def _begin(self, call: Call) -> None:
        """Sends the requests of a call. Needs no lock."""
        for request in call.requests:
            self._open[request.rid] = call
            self._inbox.send(request)

    def _end(self, call: Call) -> None:
        """Forgets a call and aborts what is unfinished. Needs no lock."""
        for request in call.requests:
            was_sent = self._open.pop(request.rid, None) is not None
            if was_sent and call.unfinished:
                self._inbox.send(Abort(request.rid, "the caller has gone"))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Holds the lock, and interrupts off, which would cut a step in two.

        Refuses a forked process first: there another thread may have left the lock locked.
        """
        self._require_alive()
        with interrupts_held(), self._lock:
            yield

    def _require_alive(self) -> None:
        if not self._close.alive:
            reason = "the program is ending"
            if os.getpid() != self._pid:
                reason = "a forked process cannot use an engine of its parent"
            raise EngineDeadError(self._dead or reason)

    def _pump(self) -> None:
        """One iteration of scheduler and detokenizer. The caller holds the lock."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        try:
            has_stepped = self._scheduler.step()
            has_converted = self._detokenizer.step()
            for message in self._results.receive():
                self._deliver(message)
            if not has_stepped and not has_converted:
                self._inbox.wait(_IDLE_WAIT)
        except BaseException as error:  # half a step was made: nothing can be relied on
            self._dead = str(error) or repr(error)
            if isinstance(error, Exception):
                raise EngineDeadError(self._dead) from error
            raise

    def _deliver(self, message: Message) -> None:
        """Hands a result to the call that it belongs to; those of closed calls are dropped."""
        if isinstance(message, TextBatch):
            now = time.monotonic()
            for delta in message.deltas:
                call = self._open.get(delta.rid)
                if call is not None:
                    call.take(delta, now)
        elif isinstance(message, TextStop):
            self._inbox.send(message)
        elif isinstance(message, RequestFailed):
            call = self._open.get(message.rid)
            if call is not None:
                kind = ValueError if message.status < 500 else RuntimeError
                call.error = kind(message.message)

    # Coroutines ---------------------------------------------------------------------------

    async def _grown(self, call: Call) -> AsyncGenerator[list[Output], None]:
        """The outputs of `call` whenever some have grown. Closed early or cancelled, it aborts what
        is unfinished."""
        news: asyncio.Queue[News] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def notify(item: News) -> None:
            loop.call_soon_threadsafe(news.put_nowait, item)

        try:
            self._watch(call, notify)
            while True:
                item = await news.get()
                if item is None:
                    return
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            with self._watch_lock:
                self._watched.pop(id(call), None)
            self._end(call)

    def _watch(self, call: Call, notify: Callable[[News], None]) -> None:
        """Sends the requests of a call whose news come by `notify`; does not wait for a step."""
        self._require_alive()
        self._begin(call)
        with self._watch_lock:
            self._watched[id(call)] = _Watched(call=call, notify=notify)
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._pump_watched, name="radix-async", daemon=True
                )
                self._watcher.start()

    def _pump_watched(self) -> None:
        """Pumps until nothing is watched any more."""
        while True:
            with self._watch_lock:
                watched = list(self._watched.values())
                if not watched:
                    self._watcher = None
                    return
            try:
                with self._turn():
                    if any(w.call.unfinished and not w.call.error for w in watched):
                        self._pump()
                    news = [(w, item) for w in watched for item in _news_of(w.call)]
            except EngineDeadError as error:
                news = [(w, error) for w in watched]
            for w, item in news:
                self._tell(w, item)

    def _tell(self, watched: _Watched, item: News) -> None:
        is_last = not isinstance(item, list)
        try:
            watched.notify(item)
        except RuntimeError:  # the event loop was closed with the call open
            is_last = True
            self._end(watched.call)
        if is_last:
            with self._watch_lock:
                self._watched.pop(id(watched.call), None)


def _close(executor: LocalExecutor, grammars: Grammars, step_log: StepLog) -> None:
    """What an engine leaves behind."""
    executor.close()
    grammars.close()
    step_log.close()


def _news_of(call: Call) -> Iterator[News]:
    """What has happened to a call since the last time. The caller holds the engine's lock."""
    outputs = [call.output(choice) for choice in call.take_grown()]
    if outputs:
        yield outputs
    if call.error is not None:
        yield call.error
    elif not call.unfinished:
        yield None
