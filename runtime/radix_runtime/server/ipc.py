"""Messages between the processes of `radix serve`: ZeroMQ PUSH/PULL in a private directory.

    api          -> scheduler     Generate, Abort, Control
    scheduler    -> detokenizer   TokenBatch, RequestFailed
    scheduler    -> api           ControlReply
    detokenizer  -> scheduler     TextStop
    detokenizer  -> api           TextBatch, RequestFailed

Every process binds one PULL socket, `<directory>/<name>.sock`. A frame is

    session token (32 bytes) | sender (u8) | sequence number (u64, little-endian) | msgpack

A frame without the session's token is counted and ignored. With it, a gap in the numbers or a body
that is no Message means that something was lost: LinkError, and the process ends.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import struct
from collections import deque
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from ..errors import EngineDeadError, RequestError
from ..messages import (
    Abort,
    Control,
    ControlReply,
    Generate,
    Message,
    RequestFailed,
    TextBatch,
    TextStop,
    TokenBatch,
    decode,
    encode,
)

API, SCHEDULER, DETOKENIZER = "api", "scheduler", "detokenizer"
ROLES = (API, SCHEDULER, DETOKENIZER)

_ROUTES: dict[str, dict[type, str]] = {
    API: {Generate: SCHEDULER, Abort: SCHEDULER, Control: SCHEDULER},
    SCHEDULER: {TokenBatch: DETOKENIZER, RequestFailed: DETOKENIZER, ControlReply: API},
    DETOKENIZER: {TextStop: SCHEDULER, TextBatch: API, RequestFailed: API},
}

TOKEN_BYTES = 32
_HEADER = struct.Struct("<32sBQ")
MAX_BODY = 64 << 20
_HIGH_WATER = 10_000
_SEND_TIMEOUT = 10.0  # seconds a full link may stay full
_MAX_BATCH = 256  # messages of one receive()
_RETRY = 0.05  # seconds until an Abort that found the link full is sent again

log = logging.getLogger(__name__)


class LinkError(EngineDeadError):
    """A link between two processes has lost a message or does not move any more."""


class _Wake(Protocol):
    def fileno(self) -> int: ...


def endpoint(directory: Path, name: str) -> str:
    return f"ipc://{directory / name}.sock"


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY + _HEADER.size)
    return socket


class Receiver:
    """The inbox of process `name`. `wake`: a descriptor whose readability also ends `wait` (the
    signal wakeup pipe); it is not read here."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        directory: Path,
        name: str,
        token: bytes,
        wake: _Wake | None = None,
    ) -> None:
        self._token = token
        self._socket = _socket(context, zmq.PULL)
        self._socket.bind(endpoint(directory, name))
        self._expected = dict.fromkeys(range(len(ROLES)), 0)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if wake is not None:
            self._poller.register(wake.fileno(), zmq.POLLIN)
        self.ignored_frames = 0

    def receive(self) -> list[Message]:
        """Messages that are there (at most a batch of them); never blocks. Raises LinkError."""
        messages: list[Message] = []
        for _ in range(_MAX_BATCH):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._open(frame)
            if message is not None:
                messages.append(message)
        return messages

    def wait(self, timeout: float | None) -> bool:
        """Sleeps until a message (True), `wake`, or the timeout in seconds."""
        ready = self._poller.poll(None if timeout is None else int(timeout * 1000))
        return any(source is self._socket for source, _ in ready)

    def _open(self, frame: bytes) -> Message | None:
        if len(frame) < _HEADER.size or not hmac.compare_digest(frame[:TOKEN_BYTES], self._token):
            self.ignored_frames += 1
            log.warning("ignored a frame that is not of this session (%d)", self.ignored_frames)
            return None
        _, sender, sequence = _HEADER.unpack_from(frame)
        if self._expected.get(sender) != sequence:
            raise LinkError(
                f"message {sequence} of sender {sender} came where "
                f"{self._expected.get(sender)} was due: messages were lost"
            )
        self._expected[sender] += 1
        try:
            return decode(frame[_HEADER.size :])
        except msgspec.DecodeError as error:
            raise LinkError(f"undecodable message of sender {sender}: {error}") from error

    @property
    def descriptor(self) -> int:
        """Readable (edge-triggered) when `receive` may find something."""
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        self._socket.close()


class _Sender:
    """One direction between two processes."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, source: str, target: str, token: bytes
    ) -> None:
        self._target = target
        self._token = token
        self._source = ROLES.index(source)
        self._sequence = 0
        self.socket = _socket(context, zmq.PUSH)
        self.socket.connect(endpoint(directory, target))

    def try_send(self, message: Message) -> bool:
        """False when the link is full. Raises LinkError on a message over the size limit."""
        body = encode(message)
        if len(body) > MAX_BODY:
            raise LinkError(f"{type(message).__name__} of {len(body)} bytes, limit {MAX_BODY}")
        header = _HEADER.pack(self._token, self._source, self._sequence)
        try:
            self.socket.send(header + body, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sequence += 1
        return True

    def send(self, message: Message, timeout: float = _SEND_TIMEOUT) -> None:
        """Waits while the link is full (or not yet connected); LinkError after the timeout."""
        while not self.try_send(message):
            if not self.socket.poll(int(timeout * 1000), zmq.POLLOUT):
                raise LinkError(f"{self._target} has not read its messages for {timeout:g} s")


class Sender:
    """The outbox of process `name`: sends each message where its type belongs."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, name: str, token: bytes) -> None:
        targets = set(_ROUTES[name].values())
        self._links = {t: _Sender(context, directory, name, t, token) for t in targets}
        self._routes = {kind: self._links[target] for kind, target in _ROUTES[name].items()}

    def send(self, message: Message) -> None:
        """Blocks while the receiver's queue is full. Raises LinkError."""
        self._routes[type(message)].send(message)

    def try_send(self, message: Message) -> bool:
        return self._routes[type(message)].try_send(message)

    def wait_connected(self, timeout: float) -> None:
        """Returns when every receiver is there. Raises LinkError."""
        for target, link in self._links.items():
            if not link.socket.poll(int(timeout * 1000), zmq.POLLOUT):
                raise LinkError(f"no connection to {target} within {timeout:g} s")

    def close(self) -> None:
        for link in self._links.values():
            link.socket.close()


class AsyncLink:
    """The API process's side: `send` never blocks, `receive` is awaited by one task."""

    def __init__(self, receiver: Receiver, sender: Sender) -> None:
        self._receiver = receiver
        self._sender = sender
        self._unsent: deque[Message] = deque()

    def send(self, message: Message) -> None:
        """Raises RequestError 503 when the scheduler's queue is full; an Abort is kept and sent as
        soon as there is room."""
        if self._unsent or not self._sender.try_send(message):
            if not isinstance(message, Abort):
                raise RequestError(503, "engine_overloaded", "too many requests", retry_after=1)
            self._unsent.append(message)
            if len(self._unsent) == 1:
                asyncio.get_running_loop().call_later(_RETRY, self._send_again)

    def _send_again(self) -> None:
        while self._unsent and self._sender.try_send(self._unsent[0]):
            self._unsent.popleft()
        if self._unsent:
            asyncio.get_running_loop().call_later(_RETRY, self._send_again)

    async def receive(self) -> list[Message]:
        """At least one message. Raises LinkError."""
        while True:
            messages = self._receiver.receive()
            if messages:
                return messages
            if not self._receiver.has_message:  # this also re-arms the descriptor
                await self._readable()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        descriptor = self._receiver.descriptor
        # Removed at once: the descriptor stays readable until the socket is looked at again.
        loop.add_reader(descriptor, _set, loop, descriptor, ready)
        try:
            await ready
        finally:
            loop.remove_reader(descriptor)


def _set(loop: asyncio.AbstractEventLoop, descriptor: int, ready: asyncio.Future[None]) -> None:
    loop.remove_reader(descriptor)
    if not ready.done():
        ready.set_result(None)
