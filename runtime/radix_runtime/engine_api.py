"""Engine: the runtime without a server."""

# Scheduler and detokenizer run in the caller's process, on the caller's thread: a call pumps them
# until its own requests are done (and advances those of other threads on the way). Other
# tensor-parallel ranks are child processes.

import os
import secrets
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from operator import index
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from . import hf
from .config import SECRETS, ServerArgs
from .engine.executor import create_executor
from .errors import EngineDeadError, RequestError, refusal
from .messages import (
    Abort,
    Generate,
    LocalChannel,
    RequestFailed,
    TextBatch,
    TextDelta,
    TextStop,
    pack_ids,
)
from .model_config import ModelConfig
from .sampling_params import SamplingParams
from .scheduler.scheduler import Scheduler
from .server.detokenizer import Detokenizer
from .server.generation import Choices, native_output, sampling_defaults, scored

_IDLE_WAIT = 0.05


class Engine(AbstractContextManager["Engine"]):
    """A loaded model. `model_path` is a directory, a hub name, or None for the embedded demo model;
    keyword arguments are the fields of ServerArgs (unknown ones raise TypeError). `tokenizer` may
    replace the model's; a model without one takes `input_ids` only and gives no text.

        with Engine("path/to/model", page_size=16) as engine:
            engine.generate("Hello", {"temperature": 0})["text"]

    Raises ConfigError for what cannot work; ValueError for a bad request, with the reason;
    EngineDeadError, on every call, once the engine has died. Threads may share an engine, forked
    processes not; a forgotten one is shut down."""

    def __init__(
        self,
        model_path: str | Path | None = None,
        *,
        tokenizer: hf.Tokenizer | None = None,
        **server_args: Any,
    ) -> None:
        # Nobody else waits behind an offline batch: its queue is as long as the batch.
        server_args.setdefault("max_queued_requests", 1 << 30)
        args = ServerArgs(model_path=None if model_path is None else str(model_path), **server_args)
        args.validate()
        folder = hf.resolve_model_path(args.model_path)
        self.args = args = replace(args, model_path=str(folder))
        self.config = ModelConfig.from_dir(folder, args.json_model_override_args)
        self.tokenizer = tokenizer or _load_tokenizer(args, folder)
        self._defaults = sampling_defaults(args, folder)
        self._lock = threading.Lock()
        self._dead: str | None = None
        self._open: dict[str, _Call] = {}
        self.executor = create_executor(
            args, self.config
        )  # what runs the steps: the engine as its scheduler sees it
        # Called once: by `shutdown`, with the last reference, or at exit. Not in a forked process:
        # its threads and other ranks are its parent's.
        self._close = weakref.finalize(self, self.executor.close)
        os.register_at_fork(after_in_child=self._close.detach)
        self._inbox, tokens, self._results = LocalChannel(), LocalChannel(), LocalChannel()
        eos_ids = hf.eos_token_ids(folder, self.tokenizer)
        self._scheduler = Scheduler(args, self.executor, self._inbox, tokens, eos_ids=eos_ids)
        self._detokenizer = Detokenizer(self.tokenizer, tokens, self._results)
        self._limits = self._scheduler.limits

    # Generation ---------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
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
        with n = 1 gives one output, else a list, the choices of a prompt side by side. With
        `stream` see `stream`."""
        ids, single = self._prompt_ids(prompt, input_ids)
        params = (
            sampling_params
            if isinstance(sampling_params, (list, tuple))
            else [sampling_params] * len(ids)
        )
        if len(params) != len(ids):
            raise ValueError(f"{len(params)} sampling_params for {len(ids)} prompts")
        if not return_logprob and (logprob_start_len != -1 or top_logprobs_num):
            raise ValueError("logprob_start_len and top_logprobs_num need return_logprob")
        wanted = (stream, return_logprob, logprob_start_len, top_logprobs_num)
        names = [""] if single else [f"prompt {i}: " for i in range(len(ids))]
        call = _Call(
            [self._request(i, p, *wanted, n) for i, p, n in zip(ids, params, names, strict=True)]
        )
        single = single and call.unfinished == 1
        grown = self._advance(call)
        if stream:
            return ({**call.output(i), **({} if single else {"index": i})} for i in grown)
        deque(grown, maxlen=0)
        outputs = [call.output(choice) for choice in sorted(call.pieces)]
        return outputs[0] if single else outputs

    def stream(self, *args: Any, **options: Any) -> Iterator[dict[str, Any]]:
        """As `generate`, but yields an output whenever a choice has grown: all of it so far,
        `finish_reason` None until its last, and, with more than one choice, its `index`. Closing
        the iterator ends the work."""
        return self.generate(*args, **options, stream=True)

    def score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        label_token_ids: Sequence[int] | None = None,
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """Scores each of `items` against `query`; one list of numbers an item. Without labels: the
        log-probability of each token of the item as continuation of the query. With labels: the
        probability of each label token after query and item (after item and query with
        `item_first`), normalised over the labels with `apply_softmax`."""
        many: Any = [items] if isinstance(items, str) or _are_ids(items) else items
        if label_token_ids is None:
            if apply_softmax or item_first:
                raise ValueError("apply_softmax and item_first need label_token_ids")
            return self._continuations([(self._ids(query), self._ids(i, False)) for i in many])
        prefixes = [
            self._joined(item, query) if item_first else self._joined(query, item) for item in many
        ]
        flat = self._continuations([(p, [t]) for p in prefixes for t in label_token_ids])
        table = np.array(flat, np.float64).reshape(len(prefixes), len(label_token_ids))
        if apply_softmax:
            table -= np.logaddexp.reduce(table, axis=1, keepdims=True)
        return np.exp(table).tolist()

    # Log-probabilities of the second part's tokens after the first, by prefill alone.
    def _continuations(self, pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        if not all(prefix and tail for prefix, tail in pairs):
            raise ValueError("score needs at least one token before and one to score")
        params = SamplingParams(max_new_tokens=0)
        call = _Call([self._request(p + t, params, False, True, len(p), 0) for p, t in pairs])
        deque(self._advance(call), maxlen=0)
        parts = (scored(logprobs) for _, logprobs in sorted(call.prompt_logprobs.items()))
        return [[entry.logprob or 0.0 for entry in part] for part in parts]

    # Requests -----------------------------------------------------------------------------

    def _ids(self, text: Any, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(text, str):
            return [index(i) for i in text]  # a fraction is no id
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: pass input_ids")
        return self.tokenizer.encode(text, add_special_tokens)

    def _joined(self, first: Any, second: Any) -> list[int]:
        if isinstance(first, str) and isinstance(second, str):
            return self._ids(first + second)
        return self._ids(first) + self._ids(second, False)

    # (ids of every prompt, whether it was a single one).
    def _prompt_ids(self, prompt: Any, input_ids: Any) -> tuple[list[list[int]], bool]:
        if (prompt is None) == (input_ids is None):
            raise ValueError("pass either prompt or input_ids")
        given = input_ids if prompt is None else prompt
        if isinstance(given, str) or (prompt is None and (len(given) == 0 or _are_ids(given))):
            return [self._ids(given)], True
        return [self._ids(one) for one in given], False

    # `name` begins what is said of a bad one. None is what leaves a field out, but for
    # `max_new_tokens`.
    def _request(
        self,
        ids: list[int],
        given: Any,
        stream: bool,
        scores: bool,
        start: int,
        top: int,
        name: str = "",
    ) -> Generate:
        try:
            if clip := not isinstance(given, SamplingParams):
                given = {
                    k: v
                    for k, v in dict(given or {}).items()
                    if v is not None or k == "max_new_tokens"
                }
                values = {"stop": [], **self._defaults, **given}
                values["stop"] = [stop] if isinstance(stop := values["stop"], str) else stop
                clip, given = (
                    "max_new_tokens" not in values,
                    msgspec.convert(values, SamplingParams, str_keys=True),
                )
            params = self._limits.admit(ids, given, "prompt", {}, clip)
            if not -1 <= start <= len(ids):
                raise refusal("invalid_value", f"logprob_start_len must be in [-1, {len(ids)}]")
            if not 0 <= top <= self.config.vocab_size:
                raise refusal(
                    "invalid_value", f"top_logprobs_num must be in [0, {self.config.vocab_size}]"
                )
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}sampling_params: {error}") from None
        except RequestError as error:
            raise ValueError(name + error.message) from None
        return Generate(secrets.token_hex(16), pack_ids(ids), params, stream, scores, start, top)

    # The machine --------------------------------------------------------------------------

    # Works until `call` is done, yielding the choices that have grown. Left early, it aborts the
    # rest.
    def _advance(self, call: "_Call") -> Iterator[int]:
        try:
            with self._turn():
                for request in call.requests:
                    self._open[request.rid] = call
                    self._inbox.send(request)
            while call.unfinished or call.grown:  # others may have brought it to its end
                with self._turn():
                    if call.unfinished and not call.error:
                        self._pump()
                    grown, call.grown = sorted(call.grown), set()
                if call.error is not None:
                    raise call.error
                yield from grown
        finally:
            with _held(signal.SIGINT), _held(signal.SIGALRM):
                for request in call.requests:
                    if self._open.pop(request.rid, None) and call.unfinished:
                        self._inbox.send(Abort(request.rid, "the caller has gone"))

    # In a fork another thread may have left the lock locked.
    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._close.alive:
            raise EngineDeadError(
                self._dead or "a forked process cannot use an engine of its parent"
            )
        with _held(signal.SIGINT), _held(signal.SIGALRM), self._lock:
            yield

    # One iteration of scheduler and detokenizer. The caller holds the lock.
    def _pump(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        try:
            worked = self._scheduler.step() | self._detokenizer.step()
            for message in self._results.receive():
                if isinstance(message, TextBatch):
                    for delta in message.deltas:
                        if (call := self._open.get(delta.rid)) is not None:
                            call.add(delta)
                elif isinstance(message, TextStop):
                    self._inbox.send(message)
                elif (
                    isinstance(message, RequestFailed)
                    and (call := self._open.get(message.rid)) is not None
                ):
                    call.error = (ValueError if message.status < 500 else RuntimeError)(
                        message.message
                    )
            if not worked:
                self._inbox.wait(_IDLE_WAIT)
        except BaseException as error:  # half a step was made: nothing can be relied on
            self._dead = str(error) or repr(error)
            if isinstance(error, Exception):
                raise EngineDeadError(self._dead) from error
            raise

    # Administration -----------------------------------------------------------------------

    def flush_cache(self) -> bool:
        """Forgets all cached prefixes. False when requests are running."""
        with self._turn():
            self._pump()  # takes in what was sent, as the abort of a stream that was closed early
            while not self._scheduler.is_idle and not self._open:
                self._pump()  # the last steps of what has ended
            return self._scheduler.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        """The resolved settings (without keys), sizes, and the scheduler's figures."""
        with self._turn():
            self._pump()
            stats = self._scheduler.stats()
        settings = {name: value for name, value in asdict(self.args).items() if name not in SECRETS}
        sizes = {
            "max_total_num_tokens": self._limits.max_total_tokens,
            "max_context": self.executor.max_context,
        }
        return {**settings, **sizes, "internal_states": [stats]}

    def shutdown(self) -> None:
        """Ends the engine and its processes, in a forked one nothing. Idempotent; later calls raise
        EngineDeadError."""
        if self._close.alive:
            with self._lock:
                self._dead = "the engine was shut down"
                self._close()

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


class _Call(Choices):
    """One `generate`; written by whichever thread pumps. `grown`: the choices that its caller has
    not seen yet."""

    def __init__(self, requests: list[Generate]) -> None:
        super().__init__(requests)
        self.error: Exception | None = None
        self.grown: set[int] = set()
        self._seconds: dict[int, float] = {}
        self._started = time.monotonic()

    def add(self, delta: TextDelta) -> int:
        choice = super().add(delta)
        self._seconds[choice] = time.monotonic() - self._started
        self.grown.add(choice)
        return choice

    def output(self, choice: int) -> dict[str, Any]:
        self.pieces[choice].prompt_logprobs = self.prompt_logprobs.get(choice)
        return native_output(
            self.request_of[choice], self.pieces[choice], self._seconds[choice], None
        )


# On the main thread the first signal of a kind waits for the end of the block, as its handler may
# raise and would cut a step in two; a second one does not, in case that the step hangs. One kind
# each: whatever raises, all are put back.
@contextmanager
def _held(number: signal.Signals) -> Iterator[None]:
    handler, noted = signal.getsignal(number), list[Any]()
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(*caught: Any) -> None:
        if noted:
            handler(*caught)
        noted[:] = caught

    try:
        signal.signal(number, note)
        yield
    finally:
        signal.signal(number, handler)
        if noted:
            handler(*noted)


def _are_ids(value: Any) -> bool:
    return len(value) > 0 and not isinstance(value[0], str) and np.ndim(value[0]) == 0


def _load_tokenizer(args: ServerArgs, folder: Path) -> hf.Tokenizer | None:
    if args.tokenizer_path is not None:
        folder = hf.resolve_model_path(args.tokenizer_path)
    elif not any((folder / n).exists() for n in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return hf.load_tokenizer(folder, args.chat_template)
