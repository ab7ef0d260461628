"""Engine: the runtime without a server.

Scheduler and detokenizer run in the caller's process, on the caller's thread: a call pumps them
until its own requests are done (and advances those of other threads on the way). With tensor
parallelism the other ranks are child processes.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import msgspec
import numpy as np

from . import hf
from .config import ServerArgs
from .engine.executor import create_executor
from .errors import ConfigError, EngineDeadError, RequestError
from .messages import (
    Abort,
    Control,
    ControlReply,
    Generate,
    Logprobs,
    Message,
    RequestFailed,
    TextBatch,
    TextDelta,
    TextStop,
    pack_ids,
    unpack_ids,
)
from .model_config import ModelConfig
from .sampling_params import SamplingParams
from .scheduler.channel import LocalChannel
from .scheduler.scheduler import Scheduler
from .server.admission import Limits, admit
from .server.detokenizer import Detokenizer

Output = dict[str, Any]
Params = SamplingParams | Mapping[str, Any]
_SECRETS = ("api_key", "api_key_file", "admin_api_key")
_IDLE_WAIT = 0.05


class Engine:
    """A loaded model. `model_path` is a directory, a hub name, or None for the embedded demo model;
    keyword arguments are the fields of ServerArgs (unknown ones raise TypeError). `tokenizer` may
    replace the model's; a model without one takes `input_ids` only and gives no text.

        with Engine("path/to/model", page_size=16) as engine:
            engine.generate("Hello", {"temperature": 0})["text"]

    Raises ConfigError for what cannot work; ValueError for a bad request, with the reason;
    EngineDeadError, on every call, once the engine has died. Threads may share an engine.
    """

    def __init__(
        self,
        model_path: str | Path | None = None,
        *,
        tokenizer: hf.Tokenizer | None = None,
        **server_args: Any,
    ) -> None:
        args = _server_args(model_path, server_args)
        folder = hf.resolve_model_path(args.model_path)
        self.args = args = replace(args, model_path=str(folder))
        self.config = ModelConfig.from_dir(folder, args.json_model_override_args)
        self.tokenizer = tokenizer or _load_tokenizer(args, folder)
        self._defaults: dict[str, Any] = {}
        if args.sampling_defaults == "model":
            self._defaults = dict(hf.load_generation_config(folder).sampling_defaults())
        self._lock = threading.Lock()
        self._dead: str | None = None
        self._open: dict[str, _Call] = {}
        self._controls: dict[int, ControlReply] = {}
        self._next_control = 0
        self._inbox, self._to_detokenizer = LocalChannel(), LocalChannel()
        self._executor = create_executor(args, self.config)
        eos_ids = hf.eos_token_ids(folder, self.tokenizer)
        outbox = _Outbox(self)
        self._scheduler = Scheduler(args, self._executor, self._inbox, outbox, eos_ids=eos_ids)
        source = self.tokenizer or _NoText()
        self._detokenizer = Detokenizer(source, self._to_detokenizer, outbox)
        self._limits = Limits(
            self._executor.max_context,
            self.config.vocab_size,
            args.max_choices,
            self._executor.num_pages * self._executor.page_size,
        )

    # Generation ---------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: str | Sequence[str] | None = ...,
        sampling_params: Params | Sequence[Params] | None = ...,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = ...,
        *,
        return_logprob: bool = ...,
        logprob_start_len: int = ...,
        top_logprobs_num: int = ...,
        stream: Literal[False] = ...,
    ) -> Output | list[Output]: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[str] | None = ...,
        sampling_params: Params | Sequence[Params] | None = ...,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = ...,
        *,
        return_logprob: bool = ...,
        logprob_start_len: int = ...,
        top_logprobs_num: int = ...,
        stream: Literal[True],
    ) -> Iterator[Output]: ...

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Output | list[Output] | Iterator[Output]:
        """Completes one prompt or a list of them, as text or token ids.

        `sampling_params` is one for all or a list of the same length; absent values come from the
        model's generation_config.json. Each output is a dict: `text`, `output_ids`, `meta_info`
        (id, finish_reason, prompt_tokens, completion_tokens, cached_tokens, e2e_latency, and with
        `return_logprob` output_token_logprobs and output_top_logprobs as lists of
        [logprob, id, None]; with `logprob_start_len` >= 0 also input_token_logprobs and
        input_top_logprobs from that prompt position on). A single prompt with n = 1 gives a dict,
        else a list, choices of a prompt side by side. With `stream` see `stream`.
        """
        ids, single = self._prompt_ids(prompt, input_ids)
        params = self._params(sampling_params, len(ids))
        requests = [
            self._request(i, p, clip, stream, return_logprob, logprob_start_len, top_logprobs_num)
            for i, (p, clip) in zip(ids, params, strict=True)
        ]
        call = _Call(requests)
        if stream:
            return self._stream(call, with_index=len(call.choices) > 1 or not single)
        self._start(call)
        try:
            while not call.done:
                self._pump(call)
        finally:
            self._finish(call)
        outputs = [choice.output(call.seconds) for choice in call.choices]
        return outputs[0] if single and len(outputs) == 1 else outputs

    def stream(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> Iterator[Output]:
        """Yields an output whenever a choice has grown: all its text and ids so far, and, with
        more than one choice, its `index`. `finish_reason` is None until the last one. The work
        ends when the iterator is closed. Options are those of `generate`."""
        return self.generate(prompt, sampling_params, input_ids, **options, stream=True)

    def _stream(self, call: _Call, with_index: bool) -> Iterator[Output]:
        self._start(call)
        try:
            while not call.done:
                self._pump(call)
                for index in call.take_grown():
                    output = call.choices[index].output(call.seconds)
                    yield {**output, "index": index} if with_index else output
        finally:
            self._finish(call)

    def score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        label_token_ids: Sequence[int] | None = None,
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """Scores each of `items` against `query`; one list of numbers an item.

        Without labels: the log-probability of each token of the item as continuation of the query.
        With labels: the probability of each label token after query and item (after item and query
        with `item_first`), normalised over the labels with `apply_softmax`.
        """
        if label_token_ids is None and (apply_softmax or item_first):
            raise ValueError("apply_softmax and item_first need label_token_ids")
        single = isinstance(items, str) or (bool(items) and isinstance(items[0], int))
        pairs = [(query, item) for item in ([items] if single else items)]
        if label_token_ids is None:
            return self._continuations([(self._ids(q), self._ids(i, False)) for q, i in pairs])
        if not label_token_ids:
            raise ValueError("label_token_ids is empty")
        prefixes = [self._join(i, q) if item_first else self._join(q, i) for q, i in pairs]
        flat = self._continuations([(p, [t]) for p in prefixes for t in label_token_ids])
        table = np.array(flat, np.float64).reshape(len(prefixes), len(label_token_ids))
        if apply_softmax:
            table -= np.logaddexp.reduce(table, axis=1, keepdims=True)
        return np.exp(table).tolist()

    def _continuations(self, pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        requests = []
        for prefix, tail in pairs:
            if not prefix or not tail:
                raise ValueError("score needs at least one token before and one to score")
            params = SamplingParams(max_new_tokens=0)
            requests.append(self._request(prefix + tail, params, False, False, True, len(prefix)))
        call = _Call(requests)
        self._start(call)
        try:
            while not call.done:
                self._pump(call)
        finally:
            self._finish(call)
        return [[value for value, _, _ in choice.input_tokens] for choice in call.choices]

    # Requests -----------------------------------------------------------------------------

    def _ids(self, text: Any, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(text, str):
            return [int(i) for i in text]
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: pass input_ids")
        return self.tokenizer.encode(text, add_special_tokens)

    def _join(self, first: Any, second: Any) -> list[int]:
        if isinstance(first, str) and isinstance(second, str):
            return self._ids(first + second)
        return self._ids(first) + self._ids(second, False)

    def _prompt_ids(self, prompt: Any, input_ids: Any) -> tuple[list[list[int]], bool]:
        """(ids of every prompt, whether it was a single one)."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("pass either prompt or input_ids")
        given = input_ids if prompt is None else prompt
        if isinstance(given, str) or (prompt is None and (len(given) == 0 or _is_id(given[0]))):
            return [self._ids(given)], True
        return [self._ids(one) for one in given], False

    def _params(self, given: Any, count: int) -> list[tuple[SamplingParams, bool]]:
        """For each prompt: its parameters, and whether the output length may be clipped."""
        many = given if isinstance(given, (list, tuple)) else [given] * count
        if len(many) != count:
            raise ValueError(f"{len(many)} sampling_params for {count} prompts")
        return [self._convert(one) for one in many]

    def _convert(self, given: Params | None) -> tuple[SamplingParams, bool]:
        if isinstance(given, SamplingParams):
            return given, False
        values: dict[str, Any] = {**self._defaults, **(given or {})}
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        try:
            params = msgspec.convert(values, SamplingParams, str_keys=True)
        except msgspec.ValidationError as error:
            raise ValueError(f"sampling_params: {error}") from None
        return params, "max_new_tokens" not in values

    def _request(
        self,
        ids: list[int],
        params: SamplingParams,
        clip: bool,
        stream: bool,
        return_logprob: bool,
        logprob_start: int = -1,
        top_logprobs: int = 0,
    ) -> Generate:
        try:
            params = admit(ids, params, self._limits, prompt_param="prompt", clip=clip)
        except RequestError as error:
            raise ValueError(error.message) from None
        if not -1 <= logprob_start <= len(ids):
            raise ValueError(f"logprob_start_len must be in [-1, {len(ids)}]")
        if not 0 <= top_logprobs <= self.config.vocab_size:
            raise ValueError(f"top_logprobs_num must be in [0, {self.config.vocab_size}]")
        if not return_logprob and (logprob_start != -1 or top_logprobs):
            raise ValueError("logprob_start_len and top_logprobs_num need return_logprob")
        return Generate(
            rid=secrets.token_hex(16),
            input_ids=pack_ids(ids),
            sampling=params,
            stream=stream,
            return_logprob=return_logprob,
            logprob_start=logprob_start,
            top_logprobs=top_logprobs,
        )

    # The machine --------------------------------------------------------------------------

    def _start(self, call: _Call) -> None:
        with self._lock:
            self._check_alive()
            for request in call.requests:
                self._open[request.rid] = call
                self._inbox.send(request)

    def _finish(self, call: _Call) -> None:
        """Aborts what has not ended."""
        for request in call.requests:
            if self._open.pop(request.rid, None) is not None and not call.done:
                self._inbox.send(Abort(request.rid, "the caller has gone"))

    def _pump(self, call: _Call | None = None) -> None:
        """One iteration of scheduler and detokenizer; raises the error of `call`."""
        with self._lock:
            if call is None or not (call.done or call.error):
                self._check_alive()
                try:
                    worked = self._scheduler.step()
                except Exception as error:
                    self._dead = str(error)
                    raise EngineDeadError(self._dead) from error
                if not (self._detokenizer.step() or worked):
                    self._inbox.wait(_IDLE_WAIT)
        if call is not None and call.error is not None:
            raise call.error

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def _route(self, message: Message) -> None:
        """Everything that scheduler and detokenizer send."""
        if isinstance(message, TextBatch):
            for delta in message.deltas:
                if (call := self._open.get(delta.rid)) is not None:
                    call.add(delta)
        elif isinstance(message, TextStop):
            self._inbox.send(message)
        elif isinstance(message, ControlReply):
            self._controls[message.id] = message
        elif isinstance(message, RequestFailed):
            if (call := self._open.get(message.rid)) is not None:
                kind = ValueError if message.status < 500 else RuntimeError
                call.error = kind(message.message)
        else:
            self._to_detokenizer.send(message)

    def _control(self, op: Literal["flush_cache", "stats", "check"]) -> ControlReply:
        with self._lock:
            self._next_control += 1
            number = self._next_control
        self._inbox.send(Control(number, op))
        while number not in self._controls:
            self._pump()
        return self._controls.pop(number)

    # Administration -----------------------------------------------------------------------

    def flush_cache(self) -> bool:
        """Forgets all cached prefixes. False when requests are running."""
        self._pump()  # takes in what was sent, as the abort of a stream that was closed early
        while not self._scheduler.is_idle and not self._open:
            self._pump()  # the last steps of what has ended
        return self._control("flush_cache").ok

    def get_server_info(self) -> dict[str, Any]:
        """The resolved settings (without keys), sizes, and the scheduler's figures."""
        settings = {k: v for k, v in asdict(self.args).items() if k not in _SECRETS}
        return {
            **settings,
            "max_total_num_tokens": self._executor.num_pages * self._executor.page_size,
            "max_context": self._executor.max_context,
            "internal_states": [self._control("stats").stats],
        }

    def shutdown(self) -> None:
        """Ends the engine and its processes. Idempotent; later calls raise EngineDeadError."""
        with self._lock:
            if self._dead == _SHUT_DOWN:
                return
            self._dead = _SHUT_DOWN
            self._executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()


_SHUT_DOWN = "the engine was shut down"


class _Outbox:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def send(self, message: Message) -> None:
        self._engine._route(message)


class _NoText:
    """Stands in for the tokenizer of a model that has none."""

    special_ids: frozenset[int] = frozenset()

    def id_to_bytes(self, token_id: int) -> bytes:
        return b""


class _Call:
    """The requests of one `generate`; written by whichever thread pumps."""

    def __init__(self, requests: list[Generate]) -> None:
        self.requests = requests
        self.choices: list[_Choice] = []
        self._first: dict[str, int] = {}
        for request in requests:
            self._first[request.rid] = len(self.choices)
            self.choices += [_Choice(request) for _ in range(request.sampling.n)]
        self._left = len(self.choices)
        self._started = time.monotonic()
        self._grown: set[int] = set()
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self._left == 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def add(self, delta: TextDelta) -> None:
        index = self._first[delta.rid] + delta.choice
        choice = self.choices[index]
        choice.add(delta)
        self._grown.add(index)
        if delta.finish is not None:
            choice.seconds = self.seconds
            self._left -= 1

    def take_grown(self) -> list[int]:
        grown, self._grown = sorted(self._grown), set()
        return grown


class _Choice:
    """What has arrived of one choice."""

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.text = ""
        self.ids: list[int] = []
        self.last: TextDelta | None = None
        self.seconds: float | None = None
        self.tokens: list[list[Any]] = []
        self.top: list[list[list[Any]]] = []
        self.input_tokens: list[list[Any]] = []
        self.input_top: list[list[list[Any]]] = []
        self._prompt = (0, 0)

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.ids += unpack_ids(delta.ids).tolist()
        if self.last is None:
            self._prompt = (delta.prompt_tokens, delta.cached_tokens)
        self.last = delta
        _extend(self.tokens, self.top, delta.logprobs)
        _extend(self.input_tokens, self.input_top, delta.prompt_logprobs)

    def output(self, seconds: float) -> Output:
        assert self.last is not None
        info: dict[str, Any] = {
            "id": self.request.rid,
            "finish_reason": self._finish_reason(),
            "prompt_tokens": self._prompt[0],
            "completion_tokens": self.last.completion_tokens,
            "cached_tokens": self._prompt[1],
            "e2e_latency": self.seconds or seconds,
        }
        if self.request.return_logprob:
            info["output_token_logprobs"] = list(self.tokens)
            info["output_top_logprobs"] = list(self.top)
            if self.request.logprob_start >= 0:
                info["input_token_logprobs"] = list(self.input_tokens)
                info["input_top_logprobs"] = list(self.input_top)
        return {"text": self.text, "output_ids": list(self.ids), "meta_info": info}

    def _finish_reason(self) -> dict[str, Any] | None:
        assert self.last is not None
        finish = self.last.finish
        if finish is None:
            return None
        if finish.type == "stop":
            return {"type": "stop", "matched": finish.matched}
        if finish.type == "length":
            return {"type": "length", "length": self.last.completion_tokens}
        return {"type": "abort", "message": finish.message, "status_code": finish.status}


def _extend(tokens: list[list[Any]], tops: list[list[list[Any]]], new: Logprobs | None) -> None:
    """Appends [logprob, id, None] a token; a token without a logprob has None for it."""
    if new is None:
        return
    ids, values = unpack_ids(new.ids).tolist(), np.frombuffer(new.logprobs, "<f4").tolist()
    tokens += [[None if math.isnan(v) else v, i, None] for v, i in zip(values, ids, strict=True)]
    if not new.top_n:
        return
    top_ids = unpack_ids(new.top_ids).reshape(-1, new.top_n).tolist()
    top = np.frombuffer(new.top_logprobs, "<f4").reshape(-1, new.top_n).tolist()
    for row_ids, row in zip(top_ids, top, strict=True):
        tops.append([[v, i, None] for v, i in zip(row, row_ids, strict=True) if i >= 0])


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, np.integer))


def _server_args(model_path: str | Path | None, given: dict[str, Any]) -> ServerArgs:
    unknown = sorted(set(given) - {f.name for f in fields(ServerArgs)})
    if unknown:
        raise TypeError(f"Engine has no argument {', '.join(map(repr, unknown))}")
    # Nobody else waits behind an offline batch: its queue is as long as the batch.
    given.setdefault("max_queued_requests", 1 << 30)
    args = ServerArgs(model_path=None if model_path is None else str(model_path), **given)
    args.validate()
    return args


def _load_tokenizer(args: ServerArgs, folder: Path) -> hf.Tokenizer | None:
    if args.tokenizer_path is not None:
        return hf.load_tokenizer(hf.resolve_model_path(args.tokenizer_path), args.chat_template)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return hf.load_tokenizer(folder, args.chat_template)


__all__ = ["ConfigError", "Engine", "EngineDeadError"]
