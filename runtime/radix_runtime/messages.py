"""Every struct that crosses between API processes, scheduler and detokenizer."""

# `Engine` passes the very same objects over deques; `serve` encodes them with msgpack over ZeroMQ,
# by the routes of processes/roles.py. Token ids travel packed, raw little-endian int32 (`pack_ids`)

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np

from .constraint import Constraint
from .errors import RequestError
from .sampling_params import SamplingParams

CONTEXT_TOKENS = 4  # enough to hold the start of a character that the prompt cut
MOST_DELTAS = 128  # in a message; without prompt logprobs each has less than 128 KiB

_ID = np.dtype("<i4")
_LOGPROB = np.dtype("<f4")
_STREAM = np.dtype("<i8")
_NIL = msgspec.Raw(b"\xc0")

Result = TypeVar("Result")

encode = msgspec.msgpack.Encoder().encode


def pack_ids(ids: object) -> bytes:
    """Token ids (any array-like of integers) as bytes."""
    return np.asarray(ids, dtype=_ID).tobytes()


def unpack_ids(packed: bytes) -> np.ndarray:
    """int32 [n]; a read-only view of `packed`."""
    return np.frombuffer(packed, dtype=_ID)


def num_ids(packed: bytes) -> int:
    """How many ids are packed in these bytes."""
    return len(packed) // _ID.itemsize


def slice_ids(packed: bytes, start: int, stop: int | None = None) -> bytes:
    """The packed ids of positions [start:stop], which are meant as in a Python slice."""
    end = None if stop is None else stop * _ID.itemsize
    return packed[start * _ID.itemsize : end]


def pack_body(value: object) -> msgspec.Raw:
    """The body of a Control or ControlReply: anything that msgspec can encode."""
    return msgspec.Raw(encode(value))


def unpack_body(body: msgspec.Raw, kind: type[Result]) -> Result:
    """What `body` says, as a value of type `kind`. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(body, type=kind)


class _Message(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """What travels on its own: the type's name is part of the encoding."""


class FinishReason(msgspec.Struct, forbid_unknown_fields=True):
    """Why a choice ended. `matched` is the stop id or stop string; `message` and `status` tell of
    an abort."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None
    status: int | None = None


class Call(NamedTuple):
    """One HTTP call, which may be made of several requests: its name and the number of choices of
    all of them. The scheduler admits a call as a whole or not at all."""

    name: str
    num_choices: int


class Generate(_Message):
    """One validated request. The scheduler fans out its n choices itself.

    `input_ids` is packed. `logprob_start` is the first prompt position whose logprob is wanted; -1:
    no prompt logprobs. `top_logprobs` counts alternatives beside the chosen token; with
    `prompt_logprobs` those of the prompt have so many, and ranks. Requests share
    cached prefixes only under the same `extra_key`. `deadline` is on time.monotonic(). `call`: what
    it is a part of, sent one after the other; None: its own. `constraint` has been compiled. `api`
    is the number of the API process that sends it, which gets what comes of it."""

    rid: str
    input_ids: bytes
    sampling: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    extra_key: tuple[str, ...] | None = None
    deadline: float | None = None
    call: Call | None = None
    constraint: Constraint | None = None
    api: int = 0

    @property
    def prompt_top(self) -> int:
        """The alternatives beside each token of the prompt that is scored."""
        return self.top_logprobs if self.prompt_logprobs is None else self.prompt_logprobs


class Abort(_Message):
    """Ends a request; an empty rid ends all of them. Idempotent."""

    rid: str
    reason: str = "aborted by the client"


class Control(_Message):
    """Asks the scheduler for an operation by name; answered by a ControlReply with the same id.
    `body` is the argument of the operation in msgpack: see `pack_body`. `api`: who asks, as in
    Generate."""

    id: int
    op: str
    body: msgspec.Raw = _NIL
    api: int = 0


class ControlError(msgspec.Struct, forbid_unknown_fields=True):
    """Why an operation was not done. The fields are RequestError's."""

    status: int
    code: str
    message: str


class ControlReply(_Message):
    """The answer to Control, for the process `api` that has asked: `body` is the result in msgpack,
    unless there is an `error`."""

    id: int
    body: msgspec.Raw = _NIL
    error: ControlError | None = None
    api: int = 0

    def result(self, kind: type[Result]) -> Result:
        """The result, which is of this type. Raises RequestError if the operation was not done,
        msgspec.DecodeError on a result of another type."""
        if self.error is not None:
            raise RequestError(
                status=self.error.status, code=self.error.code, message=self.error.message
            )
        return unpack_body(self.body, kind)


class SiblingCall(_Message):
    """From one API process of a server to another: runs operation `op` there, as Control does in
    the scheduler. Answered by a SiblingReply to `api`."""

    id: int
    op: str
    body: msgspec.Raw
    api: int


class SiblingReply(_Message):
    """The answer to a SiblingCall: `body` is the result in msgpack."""

    id: int
    body: msgspec.Raw


class RequestFailed(_Message):
    """The whole request (all choices) of process `api` ends with an error; nothing follows for this
    rid."""

    rid: str
    status: int
    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None
    api: int = 0

    def to_error(self) -> RequestError:
        """The error as the client gets it."""
        return RequestError(
            status=self.status,
            code=self.code,
            message=self.message[:300],
            param=self.param,
            retry_after=self.retry_after,
        )

    @classmethod
    def of(cls, rid: str, error: RequestError, api: int) -> "RequestFailed":
        """The message that ends request `rid` of API process `api` with `error`."""
        return cls(
            rid=rid,
            status=error.status,
            code=error.code,
            message=error.message,
            param=error.param,
            retry_after=error.retry_after,
            api=api,
        )


def _growing(data: bytes) -> bytes:
    return bytearray(data)  # type: ignore[return-value] # msgspec encodes both alike


class Logprobs(msgspec.Struct, forbid_unknown_fields=True):
    """Log-softmax of the raw logits of n tokens, packed: int32 ids [n], float32 values [n] (NaN: a
    prompt's first token), and the `top_n` likeliest of each position, [n, top_n]. `ranks` int32
    [n], 1 for the likeliest of its position (0: a prompt's first token): of a prompt's tokens where
    they are asked for, else empty."""

    ids: bytes = b""
    logprobs: bytes = b""
    top_n: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    ranks: bytes = b""

    def head(self, count: int) -> "Logprobs":
        """The part that belongs to the first `count` tokens."""
        top_count = count * self.top_n
        return Logprobs(
            ids=slice_ids(self.ids, 0, count),
            logprobs=self.logprobs[: count * _LOGPROB.itemsize],
            top_n=self.top_n,
            top_ids=slice_ids(self.top_ids, 0, top_count),
            top_logprobs=self.top_logprobs[: top_count * _LOGPROB.itemsize],
            ranks=slice_ids(self.ranks, 0, count),
        )

    def extend(self, following: "Logprobs") -> None:
        """Appends those of the tokens that follow, with the same `top_n`. The fields become
        bytearrays, so that appending piece by piece takes no longer the more there are."""
        if isinstance(self.ids, bytes):
            self.ids = _growing(self.ids)
            self.logprobs = _growing(self.logprobs)
            self.top_ids = _growing(self.top_ids)
            self.top_logprobs = _growing(self.top_logprobs)
            self.ranks = _growing(self.ranks)
        self.ids += following.ids
        self.logprobs += following.logprobs
        self.top_ids += following.top_ids
        self.top_logprobs += following.top_logprobs
        self.ranks += following.ranks

    def values(self) -> np.ndarray:
        """float32 [n]; a read-only view."""
        return np.frombuffer(self.logprobs, dtype=_LOGPROB)

    def top_values(self) -> np.ndarray:
        """float32 [n, top_n]; a read-only view."""
        values = np.frombuffer(self.top_logprobs, dtype=_LOGPROB)
        return values.reshape(num_ids(self.ids), self.top_n)


class _Delta(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What is new of one choice: its packed `ids` since the last delta. After one with `finish`
    nothing follows for (rid, choice), and `completion_tokens` is final. `prompt_logprobs` come
    once. `queue_seconds`, in the first delta, is how long the choice had waited for its row."""

    rid: str
    choice: int
    ids: bytes
    finish: FinishReason | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    queue_seconds: float | None = None


class TokenDelta(_Delta):
    """The first delta of a choice also has the number by which `StreamTokens` know it, that of the
    API process, `sampling` and the prompt's last CONTEXT_TOKENS `input_ids`."""

    stream: int | None = None
    api: int = 0
    sampling: SamplingParams | None = None
    input_ids: bytes | None = None


class StreamTokens(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """New tokens of choices that have begun, go on and have no log-probabilities, packed: int64
    `streams` [n], int32 `counts` [n] and `ids` [sum of counts], stream after stream."""

    streams: bytes
    counts: bytes
    ids: bytes

    @classmethod
    def pack(cls, streams: np.ndarray, counts: np.ndarray, ids: np.ndarray) -> "StreamTokens":
        """From arrays of integers."""
        return cls(
            streams=streams.astype(_STREAM, copy=False).tobytes(),
            counts=counts.astype(_ID, copy=False).tobytes(),
            ids=ids.astype(_ID, copy=False).tobytes(),
        )

    def __iter__(self) -> Iterator[tuple[int, bytes, list[int]]]:
        """(stream, its packed ids, its ids)."""
        packed = self.ids
        size = _ID.itemsize
        ids = unpack_ids(packed).tolist()
        streams = np.frombuffer(self.streams, dtype=_STREAM).tolist()
        start = 0
        for stream, count in zip(streams, unpack_ids(self.counts).tolist(), strict=True):
            end = start + count
            yield stream, packed[start * size : end * size], ids[start:end]
            start = end


class TokenBatch(_Message):
    """From the scheduler to the detokenizer. `tokens` came before `deltas`."""

    deltas: list[TokenDelta]
    tokens: StreamTokens | None = None


class TextStop(_Message):
    """A stop string ended (rid, choice) after `n_tokens` output tokens: the text is cut already."""

    rid: str
    choice: int
    n_tokens: int


class TextDelta(_Delta):
    """A delta with the text that its tokens have made final."""

    text: str = ""


class TextBatch(_Message):
    """From the detokenizer to the API."""

    deltas: list[TextDelta]


Delta = TypeVar("Delta", bound=_Delta)


def batches(deltas: list[Delta]) -> Iterator[list[Delta]]:
    """`deltas` in their order, cut into batches of one message each. At most one delta of a batch
    has prompt logprobs, which may be long."""
    start = 0
    for end, delta in enumerate(deltas, 1):
        if end in (start + MOST_DELTAS, len(deltas)) or delta.prompt_logprobs is not None:
            yield deltas[start:end]
            start = end


class ProcessDown(_Message):
    """From the supervisor to the peers of a restartable process: it has died. `process` is its id,
    as "scheduler/0"; `gone`: it will not be restarted."""

    process: str
    gone: bool = False


class ProcessUp(_Message):
    """From the supervisor to the peers of a process that had died: it has been restarted, for the
    `generation`-th time, and takes messages. Whatever was sent to it before and has not been
    answered is lost: send it again."""

    process: str
    generation: int


Message = (
    Generate
    | Abort
    | Control
    | ControlReply
    | SiblingCall
    | SiblingReply
    | RequestFailed
    | TokenBatch
    | TextStop
    | TextBatch
    | ProcessDown
    | ProcessUp
)
MESSAGE_TYPES = frozenset(kind.__name__ for kind in get_args(Message))

# Raises msgspec.DecodeError (or its subclass ValidationError) on anything not a Message.
decode = msgspec.msgpack.Decoder(Message).decode
