"""Engine: the runtime without a server.

Scheduler and detokenizer run in the caller's process, on the caller's thread: a call pumps them
until its own requests are done, and so advances the requests of other threads too. The other
tensor-parallel ranks are child processes.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from .config import SECRETS, ServerArgs
from .engine.executor import create_executor
from .errors import EngineDeadError
from .messages import (
    Abort,
    LocalChannel,
    Message,
    RequestFailed,
    TextBatch,
    TextDelta,
    TextStop,
)
from .offline_requests import (
    InputIds,
    LogprobOptions,
    Prompts,
    RequestBatch,
    RequestBuilder,
    are_ids,
)
from .prepare import prepare_model
from .sampling_params import SamplingParams
from .scheduler.scheduler import Scheduler
from .server.detokenizer import Detokenizer
from .server.generation import Choices, native_output, sampling_defaults, scored
from .signals import interrupts_held
from .start_log import pool_warning
from .text.generation_config import eos_token_ids
from .text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

_IDLE_WAIT = 0.05  # seconds until an idle engine looks for messages again

Output = dict[str, Any]


class Engine(AbstractContextManager["Engine"]):
    """A loaded model. `model_path` is a directory, a hub name, or None for the embedded demo model;
    keyword arguments are the fields of ServerArgs (unknown ones raise TypeError). `tokenizer` may
    replace the model's; a model without one takes `input_ids` only and gives no text.

        with Engine("path/to/model", page_size=16) as engine:
            engine.generate("Hello", {"temperature": 0})["text"]

    `args` are the settings, `config` the model's, `executor` runs the steps. Raises ConfigError for
    what cannot work; ValueError for a bad request, with the reason; EngineDeadError, on every call,
    once the engine has died. Threads may share an engine, forked processes may not. An engine that
    nobody refers to any more is shut down.
    """

    def __init__(
        self,
        model_path: str | Path | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        **server_args: Any,
    ) -> None:
        # Nobody else waits behind an offline batch: its queue is as long as the batch.
        server_args.setdefault("max_queued_requests", 1 << 30)
        args = ServerArgs(model_path=None if model_path is None else str(model_path), **server_args)
        args.validate()
        args, self.config, _ = prepare_model(args)
        folder = Path(args.model_path or "")
        self.args = args
        self.tokenizer = tokenizer or _load_tokenizer(args, folder)
        self._lock = threading.Lock()  # held by the thread that pumps
        self._dead: str | None = None  # why the engine has died
        self._open: dict[str, _Call] = {}  # by request id
        self.executor = create_executor(args, self.config)
        warning = pool_warning(
            self.executor.num_pages * self.executor.page_size, self.executor.max_context
        )
        if warning is not None:
            log.warning("%s", warning)
        # Called once: by `shutdown`, with the last reference, or at exit. Not in a forked process:
        # threads and other ranks are its parent's.
        self._close = weakref.finalize(self, self.executor.close)
        os.register_at_fork(after_in_child=self._close.detach)
        self._inbox = LocalChannel()
        self._results = LocalChannel()
        tokens = LocalChannel()
        self._scheduler = Scheduler(
            args,
            self.executor,
            inbox=self._inbox,
            outbox=tokens,
            eos_ids=eos_token_ids(folder, self.tokenizer),
        )
        self._detokenizer = Detokenizer(self.tokenizer, inbox=tokens, outbox=self._results)
        self._requests = RequestBuilder(
            self.tokenizer, self._scheduler.limits, defaults=sampling_defaults(args, folder)
        )

    # Generation ---------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Any = None,
        input_ids: InputIds | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[False] = False,
    ) -> Any: ...

    @overload
    def generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Any = None,
        input_ids: InputIds | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[True],
    ) -> Iterator[Output]: ...

    def generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Any = None,
        input_ids: InputIds | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Any:
        """Completes one prompt or a list of them, as text or token ids.

        `sampling_params` is a SamplingParams or a dict of its fields, one for all prompts or a list
        of the same length; what a dict leaves out comes from the model's generation_config.json.
        Each output is a dict: `text`, `output_ids`, `meta_info` as /generate gives it (with
        `return_logprob` also output_token_logprobs, a list of [logprob, id, None], and
        input_token_logprobs, those of the prompt from position `logprob_start_len` on if that is
        not -1; with `top_logprobs_num` output_top_logprobs and input_top_logprobs). A single prompt
        with n = 1 gives one output, else a list, the choices of a prompt side by side.
        `stream=True` is SGLang's spelling of the method `stream`.
        """
        logprobs = LogprobOptions(
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
        )
        batch = self._requests.batch(prompt, sampling_params, input_ids, logprobs, stream=stream)
        return self._stream(_Call(batch)) if stream else self._complete(_Call(batch))

    def stream(
        self,
        prompt: Prompts | None = None,
        sampling_params: Any = None,
        input_ids: InputIds | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
    ) -> Iterator[Output]:
        """As `generate`, but yields an output whenever a choice has grown: all of it so far,
        `finish_reason` None until its last, and, with more than one choice, its `index`. Closing
        the iterator aborts what is unfinished."""
        logprobs = LogprobOptions(
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
        )
        batch = self._requests.batch(prompt, sampling_params, input_ids, logprobs, stream=True)
        return self._stream(_Call(batch))

    def score(
        self,
        query: str | Sequence[int],
        items: Prompts | InputIds,
        label_token_ids: Sequence[int] | None = None,
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """Scores each of `items` against `query`; one list of numbers an item. Without labels: the
        log-probability of each token of the item as continuation of the query. With labels: the
        probability of each label token after query and item (after item and query with
        `item_first`), normalised over the labels with `apply_softmax`."""
        many: Any = [items] if isinstance(items, str) or are_ids(items) else items
        if label_token_ids is None:
            if apply_softmax or item_first:
                raise ValueError("apply_softmax and item_first need label_token_ids")
            prefix = self._requests.ids(query)
            return self._continuations([(prefix, self._requests.ids(item, False)) for item in many])
        prefixes = [
            self._requests.joined(item, query) if item_first else self._requests.joined(query, item)
            for item in many
        ]
        pairs = [(prefix, [label]) for prefix in prefixes for label in label_token_ids]
        flat = self._continuations(pairs)
        table = np.array(flat, np.float64).reshape(len(prefixes), len(label_token_ids))
        if apply_softmax:
            table -= np.logaddexp.reduce(table, axis=1, keepdims=True)
        return np.exp(table).tolist()

    def _continuations(self, pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Log-probabilities of the second part's tokens after the first, by prefill alone."""
        if not all(prefix and tail for prefix, tail in pairs):
            raise ValueError("score needs at least one token before and one to score")
        requests = []
        for prefix, tail in pairs:
            logprobs = LogprobOptions(return_logprob=True, logprob_start_len=len(prefix))
            params = SamplingParams(max_new_tokens=0)
            requests.append(self._requests.build(prefix + tail, params, logprobs))
        call = _Call(RequestBatch(requests))
        self._complete(call)
        return [
            [entry.logprob or 0.0 for entry in scored(logprobs)]
            for _, logprobs in sorted(call.prompt_logprobs.items())
        ]

    # The loop -----------------------------------------------------------------------------

    def _complete(self, call: "_Call") -> Output | list[Output]:
        with closing(self._advance(call)) as grown:
            for _ in grown:
                pass
        outputs = [call.output(choice) for choice in sorted(call.pieces)]
        return outputs[0] if call.is_single else outputs

    def _stream(self, call: "_Call") -> Iterator[Output]:
        with closing(self._advance(call)) as grown:
            for choice in grown:
                output = call.output(choice)
                if not call.is_single:
                    output["index"] = choice
                yield output

    def _advance(self, call: "_Call") -> Generator[int, None, None]:
        """Works until `call` is done and yields the choices that have grown, in order. Closed
        early, it aborts what is unfinished."""
        try:
            with self._turn():
                for request in call.requests:
                    self._open[request.rid] = call
                    self._inbox.send(request)
            while call.unfinished or call.grown:  # another thread may have brought it to its end
                with self._turn():
                    if call.unfinished and not call.error:
                        self._pump()
                    grown = call.take_grown()
                if call.error is not None:
                    raise call.error
                yield from grown
        finally:
            with interrupts_held():
                for request in call.requests:
                    was_sent = self._open.pop(request.rid, None) is not None
                    if was_sent and call.unfinished:
                        self._inbox.send(Abort(request.rid, "the caller has gone"))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Holds the lock, and interrupts off, which would cut a step in two.

        Refuses a forked process first: there another thread may have left the lock locked.
        """
        if not self._close.alive:
            raise EngineDeadError(
                self._dead or "a forked process cannot use an engine of its parent"
            )
        with interrupts_held(), self._lock:
            yield

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
            for delta in message.deltas:
                call = self._open.get(delta.rid)
                if call is not None:
                    call.add(delta)
        elif isinstance(message, TextStop):
            self._inbox.send(message)
        elif isinstance(message, RequestFailed):
            call = self._open.get(message.rid)
            if call is not None:
                kind = ValueError if message.status < 500 else RuntimeError
                call.error = kind(message.message)

    # Administration -----------------------------------------------------------------------

    def flush_cache(self) -> bool:
        """Forgets all cached prefixes. False when requests are running."""
        with self._turn():
            self._pump()  # takes in what was sent, as the abort of a stream that was closed early
            while not self._scheduler.is_idle and not self._open:
                self._pump()  # the last steps of what has ended
            is_idle = self._scheduler.is_idle
            if is_idle:
                self._scheduler.life.cache.reset()
            return is_idle

    def get_server_info(self) -> dict[str, Any]:
        """The resolved settings (without keys), sizes, and the scheduler's figures."""
        with self._turn():
            self._pump()
            stats = self._scheduler.stats()
        settings = {name: value for name, value in asdict(self.args).items() if name not in SECRETS}
        return {
            **settings,
            "max_total_num_tokens": self._scheduler.limits.max_total_tokens,
            "max_context": self.executor.max_context,
            "internal_states": [stats],
        }

    def shutdown(self) -> None:
        """Ends the engine and its processes; does nothing in a forked process. Idempotent; later
        calls of other methods raise EngineDeadError."""
        if self._close.alive:
            with self._lock:
                self._dead = "the engine was shut down"
                self._close()

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


class _Call(Choices):
    """The choices of one call, written by whichever thread pumps.

    `is_single`: one prompt with one choice, whose output stands for itself and not in a list.
    """

    def __init__(self, batch: RequestBatch) -> None:
        super().__init__(batch.requests)
        self.is_single = batch.is_single and self.unfinished == 1
        self.error: Exception | None = None
        self.grown: set[int] = set()  # the choices of which the caller has not seen the last piece
        self._seconds: dict[int, float] = {}
        self._started = time.monotonic()

    def add(self, delta: TextDelta) -> int:
        choice = super().add(delta)
        self._seconds[choice] = time.monotonic() - self._started
        self.grown.add(choice)
        return choice

    def take_grown(self) -> list[int]:
        """The choices that have grown since the last call, in order."""
        grown = sorted(self.grown)
        self.grown.clear()
        return grown

    def output(self, choice: int) -> Output:
        """The choice as far as it has come, in SGLang's shape."""
        piece = self.pieces[choice]
        piece.prompt_logprobs = self.prompt_logprobs.get(choice)
        return native_output(self.request_of[choice], piece, self._seconds[choice], tokenizer=None)


def _load_tokenizer(args: ServerArgs, folder: Path) -> Tokenizer | None:
    """The tokenizer that the settings name, or the model's; None if it has none."""
    if args.tokenizer_path is not None:
        folder = Path(args.tokenizer_path)
    elif not any((folder / n).exists() for n in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return load_tokenizer(folder, args.chat_template)
