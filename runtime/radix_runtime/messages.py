"""Every struct that crosses between the API, scheduler and detokenizer, and what carries it."""

# `Engine` passes the very same objects over deques; `serve` encodes them with msgpack over ZeroMQ
# (server/ipc.py has the routes). Ids travel as raw little-endian int32 bytes.

import threading
from collections import deque
from collections.abc import Iterator
from typing import Literal, Protocol, TypeVar

import msgspec
import numpy as np

from .errors import RequestError
from .sampling_params import SamplingParams
from .step_plan import EngineCommand

CONTEXT_TOKENS = 4  # enough to hold the start of a character that the prompt cut
MOST_DELTAS = 128  # in a message; without prompt logprobs each has less than 128 KiB


class _Message(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class FinishReason(msgspec.Struct, forbid_unknown_fields=True):
    """Why a choice ended. `matched` is the stop id or stop string; `message` and `status` tell of
    an abort."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None
    status: int | None = None


class Generate(_Message):
    """One validated request. The scheduler fans out its n choices itself. `logprob_start` -1: no
    prompt logprobs; else the first prompt position whose logprob is wanted. `top_logprobs` counts
    alternatives beside the chosen token. `deadline` is on time.monotonic(). `call`: a name and the
    number of choices of the call that it is a part of; the parts come one after the other. None: a
    call of its own."""

    rid: str
    input_ids: bytes
    sampling: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    extra_key: str | None = None
    deadline: float | None = None
    call: tuple[str, int] | None = None


class Abort(_Message):
    """Idempotent. An empty rid aborts every request."""

    rid: str
    reason: str = "aborted by the client"


class Control(_Message):
    """An operation on the scheduler itself, or a command to its engine (`body`); answered by
    ControlReply with the same id."""

    id: int
    op: Literal["flush_cache", "stats", "engine"]
    body: EngineCommand | None = None


class ControlReply(_Message):
    """`ok`: it was done; the cache is not flushed while requests run or wait."""

    id: int
    ok: bool
    stats: dict[str, float] = {}
    answers: list[str] = []  # of the ranks, to a command
    error: str = ""  # why a command failed


class RequestFailed(_Message):
    """The whole request (all choices) ends with an error; nothing follows for this rid."""

    rid: str
    status: int
    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None

    @classmethod
    def of(cls, rid: str, error: RequestError) -> "RequestFailed":
        return cls(
            rid=rid,
            status=error.status,
            code=error.code,
            message=error.message,
            param=error.param,
            retry_after=error.retry_after,
        )


class Logprobs(msgspec.Struct, forbid_unknown_fields=True):
    """Log-softmax of the raw logits: int32 ids, float32 values (NaN: a prompt's first token),
    `top_n` for each."""

    ids: bytes = b""
    logprobs: bytes = b""
    top_n: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    """News of one choice; after `finish` nothing follows for (rid, choice), and `completion_tokens`
    is final."""

    rid: str
    choice: int
    ids: bytes
    finish: FinishReason | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class TokenDelta(_Delta):
    """The first delta of a choice also has `sampling` and the prompt's last CONTEXT_TOKENS
    `input_ids`."""

    sampling: SamplingParams | None = None
    input_ids: bytes | None = None


class TokenBatch(_Message):
    deltas: list[TokenDelta]


class TextStop(_Message):
    """A stop string ended (rid, choice) after `n_tokens` output tokens. Saves work only: the text
    is already cut."""

    rid: str
    choice: int
    n_tokens: int


class TextDelta(_Delta):
    text: str = ""


class TextBatch(_Message):
    deltas: list[TextDelta]


Delta = TypeVar("Delta", TokenDelta, TextDelta)


def batches(deltas: list[Delta]) -> Iterator[list[Delta]]:
    """`deltas` in their order, a message each: at most one of them has prompt logprobs, which may
    be long."""
    start = 0
    for end, delta in enumerate(deltas, 1):
        if end in (start + MOST_DELTAS, len(deltas)) or delta.prompt_logprobs is not None:
            yield deltas[start:end]
            start = end


Message = (
    Generate | Abort | Control | ControlReply | RequestFailed | TokenBatch | TextStop | TextBatch
)

encode = msgspec.msgpack.Encoder().encode
# Raises msgspec.DecodeError (or its subclass ValidationError) on anything not a Message.
decode = msgspec.msgpack.Decoder(Message).decode


def pack_ids(ids: object) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> np.ndarray:
    """int32 [n]; read-only view of `data`."""
    return np.frombuffer(data, dtype="<i4")


class Inbox(Protocol):
    def receive(self) -> list[Message]:
        """All messages that have arrived, in order; never blocks."""

    def wait(self, timeout: float | None) -> bool:
        """Sleeps until a message is there (True) or `timeout` seconds have passed (False)."""


class Outbox(Protocol):
    def send(self, message: Message) -> None:
        """Routes by type: TokenBatch to the detokenizer, the rest to the API."""


class LocalChannel:
    """Inbox and Outbox in one process, over a deque; any thread may send, one receives."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._arrived = threading.Event()

    def send(self, message: Message) -> None:
        self._messages.append(message)
        self._arrived.set()

    def receive(self) -> list[Message]:
        self._arrived.clear()
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def wait(self, timeout: float | None) -> bool:
        return self._arrived.wait(timeout)
