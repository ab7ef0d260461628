"""Messages between the processes of `radix serve`: ZeroMQ PUSH/PULL in a private directory."""

# Every process binds one PULL socket, `<directory>/<name>.sock`. A frame is the session's token (32
# bytes), the sender (u8), a sequence number (u64, little-endian) and msgpack. A frame without the
# token is counted and ignored. In one that has it, a gap in the numbers or a body that is no
# Message raises LinkError, which ends the process: something was lost.

import asyncio
import hmac
import logging
import socket
import struct
from collections import deque
from pathlib import Path

import msgspec
import zmq

from .. import messages as m
from ..errors import EngineDeadError, RequestError
from ..messages import Message

API = "api"
SCHEDULER = "scheduler"
DETOKENIZER = "detokenizer"
ROLES = (API, SCHEDULER, DETOKENIZER)

_ROUTES: dict[str, dict[type, str]] = {
    API: {m.Generate: SCHEDULER, m.Abort: SCHEDULER, m.Control: SCHEDULER},
    SCHEDULER: {m.TokenBatch: DETOKENIZER, m.RequestFailed: DETOKENIZER, m.ControlReply: API},
    DETOKENIZER: {m.TextStop: SCHEDULER, m.TextBatch: API, m.RequestFailed: API},
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


def endpoint(directory: Path, name: str) -> str:
    """The ZeroMQ address of the inbox of process `name`."""
    return f"ipc://{directory / name}.sock"


def _socket(kind: int) -> zmq.Socket[bytes]:
    created: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    created.set_hwm(_HIGH_WATER)
    created.setsockopt(zmq.LINGER, 0)
    created.setsockopt(zmq.IMMEDIATE, 1)
    created.setsockopt(zmq.MAXMSGSIZE, MAX_BODY + _HEADER.size)
    return created


class Receiver:
    """The inbox of process `name`. `wake`: a socket that also ends `wait` when it is readable; it
    is not read here."""

    def __init__(
        self, directory: Path, name: str, token: bytes, wake: socket.socket | None = None
    ) -> None:
        self._token = token
        self._socket = _socket(zmq.PULL)
        self._socket.bind(endpoint(directory, name))
        self._expected = dict.fromkeys(range(len(ROLES)), 0)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if wake is not None:
            self._poller.register(wake, zmq.POLLIN)  # which keeps it open
        self.ignored_frames = 0

    def receive(self) -> list[Message]:
        """Messages that have arrived, at most a batch of them; never blocks. Raises LinkError."""
        found: list[Message] = []
        while len(found) < _MAX_BATCH and self._socket.poll(0):
            frame = self._socket.recv()
            if len(frame) >= _HEADER.size and hmac.compare_digest(frame[:TOKEN_BYTES], self._token):
                found.append(self._open(frame))
            else:
                self.ignored_frames += 1
                log.warning("ignored a frame that is not of this session (%d)", self.ignored_frames)
        return found

    def wait(self, timeout: float | None) -> bool:
        """Sleeps until a message (True), `wake`, or the timeout in seconds."""
        ready = self._poller.poll(None if timeout is None else int(timeout * 1000))
        return any(source is self._socket for source, _ in ready)

    def _open(self, frame: bytes) -> Message:
        _, sender, sequence = _HEADER.unpack_from(frame)
        due = self._expected.get(sender)
        if due != sequence:
            raise LinkError(
                f"message {sequence} of sender {sender} came where {due} was due: "
                "messages were lost"
            )
        self._expected[sender] += 1
        try:
            return m.decode(frame[_HEADER.size :])
        except msgspec.DecodeError as error:
            raise LinkError(f"undecodable message of sender {sender}: {error}") from error

    async def readable(self) -> None:
        """Returns when `receive` may find something."""
        if self._socket.poll(0):  # asking also re-arms the descriptor
            return
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        descriptor = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(descriptor)


class Sender:
    """The outbox of process `name`: sends each message where its type belongs."""

    def __init__(self, directory: Path, name: str, token: bytes) -> None:
        self._token = token
        self._source = ROLES.index(name)
        self._routes = _ROUTES[name]
        self._sequence = dict.fromkeys(self._routes.values(), 0)
        self._sockets = {target: _socket(zmq.PUSH) for target in self._sequence}
        for target, link in self._sockets.items():
            link.connect(endpoint(directory, target))

    def send(self, message: Message) -> None:
        """Waits while the link is full or not yet connected. Raises LinkError when that lasts."""
        while not self.try_send(message):
            target = self._routes[type(message)]
            if not self._sockets[target].poll(int(_SEND_TIMEOUT * 1000), zmq.POLLOUT):
                raise LinkError(f"{target} has not read its messages for {_SEND_TIMEOUT:g} s")

    def try_send(self, message: Message) -> bool:
        """False when the link is full. Raises LinkError on a message over the size limit."""
        target = self._routes[type(message)]
        body = m.encode(message)
        if len(body) > MAX_BODY:
            raise LinkError(f"{type(message).__name__} of {len(body)} bytes, limit {MAX_BODY}")
        header = _HEADER.pack(self._token, self._source, self._sequence[target])
        try:
            self._sockets[target].send(header + body, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sequence[target] += 1
        return True

    def wait_connected(self, timeout: float = 60.0) -> None:
        """Returns when every receiver is there. Raises LinkError."""
        for target, link in self._sockets.items():
            if not link.poll(int(timeout * 1000), zmq.POLLOUT):
                raise LinkError(f"no connection to {target} within {timeout:g} s")


class AsyncLink:
    """The API process's side: `send` never blocks, `receive` is awaited by one task."""

    def __init__(self, receiver: Receiver, sender: Sender) -> None:
        self._receiver = receiver
        self._sender = sender
        self._unsent: deque[Message] = deque()

    def send(self, message: Message) -> None:
        """Raises RequestError 503 when the link is full; an Abort is kept and sent later."""
        if not self._unsent and self._sender.try_send(message):
            return
        if not isinstance(message, m.Abort):
            raise RequestError(
                status=503,
                code="engine_overloaded",
                message="too many requests",
                retry_after=1,
            )
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._send_again()

    def _send_again(self) -> None:
        while self._unsent and self._sender.try_send(self._unsent[0]):
            self._unsent.popleft()
        if self._unsent:
            asyncio.get_running_loop().call_later(_RETRY, self._send_again)

    async def receive(self) -> list[Message]:
        """At least one message. Raises LinkError."""
        while not (found := self._receiver.receive()):
            await self._receiver.readable()
        return found
