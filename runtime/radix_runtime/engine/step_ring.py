"""Carries plans and commands from rank 0 to the workers: one producer, many consumers, shared
memory.

The ring holds bytes; each frame follows its length in 8 bytes. A frame larger than the free space
travels in pieces. Each consumer sleeps on its own eventfd, so an idle worker costs nothing. The
memory is an anonymous memfd: it is freed with the last process, however that one ends."""

import mmap
import os
import select
import time
from contextlib import suppress

import msgspec

from ..errors import EngineDeadError

_LINE = 8  # words of a cache line: no two writers share one
_SPIN_SECONDS = 50e-6
_FULL_SLEEP = 200e-6


class RingHandle(msgspec.Struct, forbid_unknown_fields=True):
    """What a child needs to attach. `fds` are the descriptors that it inherits: the memory, then
    the event of each consumer. `capacity` is in bytes."""

    fds: list[int]
    capacity: int


class _Ring:
    """The mapped words and data, as both ends see them. Positions count bytes since the start:

        word 0            bytes published
        word 8            closed flag
        word 8 * (2 + r)  bytes that consumer r has taken
        data              byte p is at p % capacity

    A store to a word must not overtake the stores to the data before it: x86 keeps their order."""

    def __init__(self, handle: RingHandle) -> None:
        self.handle = handle
        words = _LINE * (1 + len(handle.fds))  # one descriptor is the memory's
        size = 8 * words + handle.capacity
        if os.fstat(handle.fds[0]).st_size < size:
            os.ftruncate(handle.fds[0], size)
        self._memory = mmap.mmap(handle.fds[0], size)
        memory = memoryview(self._memory)
        self._words = memory[: 8 * words].cast("q")
        self._data = memory[8 * words :]
        self._acks = self._words[_LINE * 2 :: _LINE]

    @property
    def closed(self) -> bool:
        """Whether rank 0 has closed the ring."""
        return bool(self._words[_LINE])


class StepRing(_Ring):
    """Rank 0's end. Used by one thread, except `close`, which any thread may call."""

    def __init__(self, consumers: int, capacity: int = 1 << 20) -> None:
        events = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(consumers)]
        memory = os.memfd_create("radix-steps")
        super().__init__(RingHandle(fds=[memory, *events], capacity=capacity))
        self._published = 0

    def publish(self, frame: bytes, timeout: float = 60.0) -> None:
        """Sends `frame` to every consumer. Raises EngineDeadError: the ring is closed, or stays
        full for `timeout` seconds; then it names the ranks that take nothing."""
        rest = memoryview(len(frame).to_bytes(8, "little") + frame)
        while rest:
            room = self._room(timeout)
            start = self._published % self.handle.capacity
            part = rest[: min(room, self.handle.capacity - start)]
            self._data[start : start + len(part)] = part
            self._published += len(part)
            self._words[0] = self._published
            self._wake()
            rest = rest[len(part) :]

    def _room(self, timeout: float) -> int:
        """Waits for free space; returns how many bytes there are."""
        deadline = time.monotonic() + timeout
        while not self.closed:
            taken = self._acks.tolist()
            room = self.handle.capacity - self._published + min(taken)
            if room:
                return room
            if time.monotonic() > deadline:
                slow = ", ".join(str(r) for r, ack in enumerate(taken, 1) if ack == min(taken))
                raise EngineDeadError(f"worker rank {slow} took no step in {timeout:g} s")
            time.sleep(_FULL_SLEEP)
        raise EngineDeadError("the step ring is closed")

    def close(self) -> None:
        """Ends every consumer's `receive` with None. Idempotent."""
        self._words[_LINE] = 1
        self._wake()

    def _wake(self) -> None:
        for fd in self.handle.fds[1:]:
            os.eventfd_write(fd, 1)

    def release(self) -> None:
        """Frees the memory and the descriptors, after the consumers have ended. The ring must not
        be used any more."""
        for view in (self._acks, self._words, self._data):
            view.release()
        # It holds a descriptor of its own, which should not wait for the garbage collector.
        self._memory.close()
        for fd in self.handle.fds:
            os.close(fd)


class StepRingReader(_Ring):
    """Consumer `index` (rank - 1) of a ring whose descriptors this process has inherited."""

    def __init__(self, handle: RingHandle, index: int) -> None:
        super().__init__(handle)
        self._index = index
        self._event_fd = handle.fds[1 + index]
        self._taken = self._acks[index]
        self._poll = select.poll()
        self._poll.register(self._event_fd, select.POLLIN)

    def receive(self) -> bytes | None:
        """Sleeps until there is a frame and returns it; None when the ring is closed."""
        size = self._take(8)
        return None if size is None else self._take(int.from_bytes(size, "little"))

    def _take(self, count: int) -> bytes | None:
        taken = bytearray()
        while len(taken) < count:
            available = self._wait()
            if not available:
                return None
            start = self._taken % self.handle.capacity
            part = self._data[start : start + min(available, count - len(taken))]
            taken += part
            self._taken += len(part)
            self._acks[self._index] = self._taken
        return bytes(taken)

    def _wait(self) -> int:
        """Sleeps until there are bytes; returns how many, 0 when the ring is closed."""
        spin_until = time.monotonic() + _SPIN_SECONDS
        while not self.closed:
            available = self._words[0] - self._taken
            if available:
                return available
            if time.monotonic() > spin_until:
                self._poll.poll()
                with suppress(BlockingIOError):  # drained for earlier bytes
                    os.eventfd_read(self._event_fd)
        return 0
