"""What the grammar processes and their owners tell each other, and how it travels."""

# Frames over a socket of the two: a length (u32, little-endian), then msgpack.

import socket
import struct

import msgspec

from ..constraint import Constraint
from ..errors import RequestError
from .backend import Vocabulary

_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class _Frame(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The type's name is part of the encoding."""


class Hello(_Frame):
    """The first frame to a process: the name of its backend, and what it compiles for. Of a
    compiler `threads` is how many grammars it tries at a time, `cpu_seconds` what each may take. A
    masker fills masks by `threads`, in shared memory of `mask_rows` rows, and keeps grammars of
    `cache_bytes` that nobody uses."""

    backend: str
    vocabulary: Vocabulary
    threads: int
    cpu_seconds: float = 0.0
    cache_bytes: int = 0
    mask_rows: int = 0


class Compile(_Frame):
    """To the compilers: is this a grammar that can be kept?"""

    job: int
    constraint: Constraint


class Accepted(_Frame):
    """It is."""

    job: int
    warnings: list[str] = []


class Refused(_Frame):
    """It is not; the fields are RequestError's."""

    job: int
    status: int
    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, job: int, error: RequestError) -> "Refused":
        """The frame that tells of `error`."""
        return cls(
            job,
            status=error.status,
            code=error.code,
            message=error.message,
            param=error.param,
        )

    def to_error(self) -> RequestError:
        """The error as the client gets it."""
        return RequestError(
            status=self.status, code=self.code, message=self.message, param=self.param
        )


class Open(_Frame):
    """To the masker: a matcher for an answer that has the tokens `ids` already. Masks hold back
    `stop_ids` until it has `min_tokens`, unless nothing else is allowed. `job` is its number from
    now on; Refused is the answer where it cannot be built, else Accepted. `alone`: while nothing
    else is at work, and under its number in the shared memory."""

    job: int
    constraint: Constraint
    ids: list[int] = []
    stop_ids: list[int] = []
    min_tokens: int = 0
    alone: bool = False


class Close(_Frame):
    """To the masker: these answers have ended."""

    jobs: list[int]


class RowFill(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The matcher `job` gets `ids`; then its mask goes to `row` of the shared memory, which is its
    alone until Filled names it."""

    job: int
    row: int
    ids: list[int]


class Fill(_Frame):
    """To the masker: masks that a step needs; `alone` as of Open, one by one."""

    rows: list[RowFill]
    alone: bool = False


class Filled(_Frame):
    """The masks of the matchers `jobs` are there, in any order. `failed` are those of them that are
    in error, and why; their rows allow everything. `free` are those whose answers may have any
    tokens from now on."""

    jobs: list[int]
    failed: dict[int, str] = {}
    free: list[int] = []


class Evicted(_Frame):
    """From the masker: it has no grammars of these keys any more."""

    keys: list[bytes]


Frame = Hello | Compile | Accepted | Refused | Open | Close | Fill | Filled | Evicted
_decode = msgspec.msgpack.Decoder(Frame).decode


def pack_frame(frame: Frame) -> bytes:
    """The bytes of a frame with its length."""
    data = _encode(frame)
    return _LENGTH.pack(len(data)) + data


def read_frame(connection: socket.socket) -> Frame:
    """The next frame; waits for it. Raises EOFError at the end of the connection."""
    size = _LENGTH.unpack(_read(connection, _LENGTH.size))[0]
    return _decode(_read(connection, size))


def _read(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data
