"""Messages between the processes of `radix serve`: ZeroMQ PUSH/PULL in a private directory."""

# Every process binds one PULL socket in the directory and connects a PUSH socket to each process
# that it sends to. A frame is the session's token (32 bytes), the sender (u16), the generations of
# sender and receiver (u32 each), a sequence number (u64), all little-endian, and msgpack. A frame
# without the token is counted and ignored. In one that has it, a gap in the numbers or a body that
# is no Message raises LinkError, which ends the process: something was lost.
#
# The generation of a process is the number of its restarts. Numbering begins anew with each
# generation of either side; what a former generation sent, or what was meant for one, is dropped.

import asyncio
import hmac
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from .. import messages as m
from ..errors import EngineDeadError, RequestError
from ..messages import Message
from .roles import Topology

TOKEN_BYTES = 32
_HEADER = struct.Struct("<32sHIIQ")
MAX_BODY = 64 << 20
_HIGH_WATER = 10_000
_SEND_TIMEOUT = 10.0  # seconds a full link may stay full
_SEND_SLICE = 0.05  # seconds between two looks at whether this process is to stop
_MAX_BATCH = 256  # messages of one receive()
_RECONNECT_TIMEOUT = 1.0  # seconds for a connection to a process that is there
_RETRY = 0.05  # seconds until an Abort that found the link full is sent again

ProcessChange = m.ProcessDown | m.ProcessUp
_SiblingMessage = m.SiblingCall | m.SiblingReply

log = logging.getLogger(__name__)


class LinkError(EngineDeadError):
    """A link between two processes has lost a message or does not move any more."""


class ProcessUnavailable(Exception):
    """A restartable process cannot be reached now; nothing was sent. A ProcessUp comes when it is
    back."""


def endpoint(directory: Path, process: str) -> str:
    """The ZeroMQ address of the inbox of a process."""
    return f"ipc://{directory / process.replace('/', '.')}.sock"


@dataclass(frozen=True)
class Node:
    """One process among the others of its instance: its id, and what all links have in common.

    `generations` are those of the processes that were restarted, this one included."""

    process: str
    topology: Topology
    directory: Path
    token: bytes
    generations: Mapping[str, int] = field(default_factory=dict)

    def generation(self, process: str) -> int:
        """How often a process had been restarted when this one started."""
        return self.generations.get(process, 0)


def _socket(kind: int) -> zmq.Socket[bytes]:
    created: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    created.set_hwm(_HIGH_WATER)
    created.setsockopt(zmq.LINGER, 0)
    created.setsockopt(zmq.IMMEDIATE, 1)
    created.setsockopt(zmq.MAXMSGSIZE, MAX_BODY + _HEADER.size)
    return created


@dataclass(slots=True)
class _Expected:
    """What is due of one sender: the next number of its present generation."""

    generation: int = 0
    sequence: int = 0


class Receiver:
    """The inbox of a process. `wake`: a socket that also ends `wait` when it is readable; it is not
    read here. `on_change` is called with each ProcessDown and ProcessUp before it is given out."""

    def __init__(
        self,
        node: Node,
        wake: socket.socket | None = None,
        on_change: Callable[[ProcessChange], object] | None = None,
    ) -> None:
        self._token = node.token
        self._generation = node.generation(node.process)
        self._on_change = on_change
        self._senders = node.topology.everybody()
        self._expected = [_Expected(node.generation(sender)) for sender in self._senders]
        self._socket = _socket(zmq.PULL)
        self._socket.bind(endpoint(node.directory, node.process))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if wake is not None:
            self._poller.register(wake, zmq.POLLIN)  # which keeps it open
        self._woken = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller.register(self._woken, zmq.POLLIN)
        self.ignored_frames = 0

    def receive(self) -> list[Message]:
        """Messages that have arrived, at most a batch of them; never blocks. Raises LinkError."""
        found: list[Message] = []
        while len(found) < _MAX_BATCH and self._socket.poll(0):
            frame = self._socket.recv()
            if len(frame) < _HEADER.size or not hmac.compare_digest(
                frame[:TOKEN_BYTES], self._token
            ):
                self.ignored_frames += 1
                log.warning("ignored a frame that is not of this session (%d)", self.ignored_frames)
                continue
            message = self._open(frame)
            if self._on_change is not None and isinstance(message, ProcessChange):
                self._on_change(message)
            if message is not None:
                found.append(message)
        return found

    def wait(self, timeout: float | None) -> bool:
        """Sleeps until a message (True), `wake`, or the timeout in seconds."""
        ready = [source for source, _ in self._poller.poll(_milliseconds(timeout))]
        if self._woken in ready:
            os.eventfd_read(self._woken)
        return any(source is self._socket for source in ready)

    def wake(self) -> None:
        """Ends a `wait` of another thread."""
        os.eventfd_write(self._woken, 1)

    def _open(self, frame: bytes) -> Message | None:
        """The message; None if its sender or its receiver has been restarted since."""
        _, number, sender_generation, own_generation, sequence = _HEADER.unpack_from(frame)
        if number >= len(self._senders):
            raise LinkError(f"message {sequence} came of sender {number}, who does not exist")
        sender = self._senders[number]
        expected = self._expected[number]
        if sender_generation < expected.generation or own_generation < self._generation:
            return None
        if sender_generation > expected.generation:
            expected.generation = sender_generation
            expected.sequence = 0
        if expected.sequence != sequence:
            raise LinkError(
                f"message {sequence} of {sender} came where {expected.sequence} was due: "
                "messages were lost"
            )
        expected.sequence += 1
        try:
            return m.decode(frame[_HEADER.size :])
        except msgspec.DecodeError as error:
            raise LinkError(f"undecodable message of {sender}: {error}") from error

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


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1000)


class Link:
    """The way from one process to another. `target` is the other's id."""

    def __init__(self, node: Node, target: str) -> None:
        self.target = target
        self.restartable = node.topology.role(target).restartable
        self._address = endpoint(node.directory, target)
        self._token = node.token
        self._source = node.topology.everybody().index(node.process)
        self._own_generation = node.generation(node.process)
        self._generation = node.generation(target)
        self._sequence = 0
        self._socket: zmq.Socket[bytes] | None = None  # None: the target is down
        self._connect()

    def _connect(self) -> None:
        self._socket = _socket(zmq.PUSH)
        self._socket.connect(self._address)

    def close(self) -> None:
        """Nothing is sent any more, nor what waits."""
        if self._socket is not None:
            self._socket.close(0)
        self._socket = None

    def try_send(self, body: bytes) -> bool:
        """False when the link is full, not connected, or its target is down."""
        if self._socket is None:
            return False
        header = _HEADER.pack(
            self._token, self._source, self._own_generation, self._generation, self._sequence
        )
        try:
            self._socket.send(header + body, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sequence += 1
        return True

    def wait_writable(self, timeout: float) -> bool:
        """Waits until the link is connected and takes a message; False if that takes longer than
        `timeout` seconds."""
        if self._socket is None:
            return False
        return bool(self._socket.poll(int(timeout * 1000), zmq.POLLOUT))

    def target_started(self, generation: int) -> None:
        """Connects to a new generation of the target, with numbers from 0."""
        if generation == self._generation:
            return  # known
        self.close()
        self._generation = generation
        self._sequence = 0
        self._connect()
        self.wait_writable(_RECONNECT_TIMEOUT)  # False: it has died again, and ProcessDown follows


class Sender:
    """The outbox of a process: sends each message where its type belongs. Once `should_stop()` says
    that this process is to end, it waits for nobody, and what a link does not take is dropped."""

    def __init__(self, node: Node, should_stop: Callable[[], bool] = lambda: False) -> None:
        self._should_stop = should_stop
        sends = node.topology.role(node.process).sends
        self._links: dict[str, Link] = {}  # by process
        self._routes: dict[str, list[Link]] = {}  # by type of message; a link an instance
        for message_type, role in sends.items():
            targets = node.topology.instances(role)
            for target in targets:
                if target not in self._links:
                    self._links[target] = Link(node, target)
            self._routes[message_type] = [self._links[target] for target in targets]

    def send(self, message: Message, instance: int = 0) -> None:
        """Sends to one `instance` of the role that the type of the message belongs to. Waits while
        the link is full or not yet connected, and raises LinkError when that lasts. Never waits for
        a restartable process: raises ProcessUnavailable."""
        link = self._link(message, instance)
        body = _encoded(message)
        deadline = time.monotonic() + _SEND_TIMEOUT
        while not link.try_send(body):
            if self._should_stop():
                return
            if link.restartable:
                raise ProcessUnavailable(f"{link.target} takes no messages now")
            if not link.wait_writable(_SEND_SLICE) and time.monotonic() > deadline:
                role = link.target.rpartition("/")[0]
                raise LinkError(f"{role} has not read its messages for {_SEND_TIMEOUT:g} s")

    def try_send(self, message: Message, instance: int = 0) -> bool:
        """False when the link is full. Raises LinkError on a message over the size limit."""
        return self._link(message, instance).try_send(_encoded(message))

    def _link(self, message: Message, instance: int) -> Link:
        return self._routes[type(message).__name__][instance]

    def wait_connected(self, timeout: float = 60.0) -> None:
        """Returns when every receiver is there. Raises LinkError."""
        for target, link in self._links.items():
            if not link.wait_writable(timeout):
                raise LinkError(f"no connection to {target} within {timeout:g} s")

    def follow(self, change: ProcessChange) -> None:
        """Closes or reopens the link to a process that has died or been restarted."""
        link = self._links.get(change.process)
        if link is None:
            return
        if isinstance(change, m.ProcessUp):
            link.target_started(change.generation)
        else:
            link.close()  # until it has been started again


class Announcer:
    """The supervisor's links, for its notices to single processes. `node.generations` must be the
    present ones whenever it is used."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._links: dict[str, Link] = {}

    def tell(self, target: str, change: ProcessChange) -> None:
        """Raises LinkError if the process does not take messages."""
        if target not in self._links:
            self._links[target] = Link(self._node, target)
        link = self._links[target]
        link.wait_writable(_RECONNECT_TIMEOUT)
        if not link.try_send(_encoded(change)):
            raise LinkError(f"{target} takes no messages")

    def forget(self, target: str) -> None:
        """This process has died; messages to its next generation take a new link."""
        link = self._links.pop(target, None)
        if link is not None:
            link.close()


def _encoded(message: Message) -> bytes:
    body = m.encode(message)
    if len(body) > MAX_BODY:
        raise LinkError(f"{type(message).__name__} of {len(body)} bytes, limit {MAX_BODY}")
    return body


class AsyncLink:
    """An API process's side: `send` never blocks, `receive` is awaited by one task."""

    def __init__(self, receiver: Receiver, sender: Sender) -> None:
        self._receiver = receiver
        self._sender = sender
        self._unsent: deque[m.Abort] = deque()  # for the scheduler, the oldest first

    def send(self, message: Message, instance: int = 0) -> None:
        """Raises RequestError 503 when the link is full; an Abort is kept and sent later."""
        # What the scheduler gets stays in its order. Siblings have links of their own.
        must_wait = bool(self._unsent) and not isinstance(message, _SiblingMessage)
        if not must_wait and self._sender.try_send(message, instance):
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
