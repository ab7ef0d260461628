"""The way of a StepPlan from rank 0 to the workers: one producer, many consumers, shared memory.

    word 0                 sequence number of the last published slot
    word 8                 closed flag
    word 8 * (2 + 2r)      acknowledgement of consumer r: the last slot it has taken
    word 8 * (3 + 2r)      heartbeat of consumer r, CLOCK_MONOTONIC nanoseconds
    slots                  [slots][32-byte header | slot_bytes]
                           header: sequence, frame size, offset in the frame

A frame larger than a slot travels in several; a slot is used again when every consumer has
acknowledged it. Each consumer sleeps on its own eventfd, so an idle worker costs nothing. The
memory is an anonymous memfd: it goes with the last process, however that one dies.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from contextlib import suppress

import msgspec
import numpy as np

from ..errors import EngineDeadError

_LINE = 8  # words of a cache line: no two writers share one
_HEADER_BYTES = 32
_SPIN_SECONDS = 50e-6
_FULL_SLEEP = 200e-6


class RingHandle(msgspec.Struct, forbid_unknown_fields=True):
    """What a child needs to attach: inherited descriptors and the layout."""

    memory_fd: int
    event_fds: list[int]
    slots: int
    slot_bytes: int

    @property
    def fds(self) -> list[int]:
        return [self.memory_fd, *self.event_fds]


class _Layout:
    """The mapped words and slots, as both ends see them."""

    def __init__(self, handle: RingHandle) -> None:
        self.handle = handle
        control = _LINE * 8 * (2 + 2 * len(handle.event_fds))
        stride = _HEADER_BYTES + handle.slot_bytes
        size = control + handle.slots * stride
        if os.fstat(handle.memory_fd).st_size < size:
            os.ftruncate(handle.memory_fd, size)
        self._memory = mmap.mmap(handle.memory_fd, size)
        self.words = np.frombuffer(self._memory, np.uint64, control // 8)
        slots = np.frombuffer(self._memory, np.uint8, handle.slots * stride, control)
        slots = slots.reshape(handle.slots, stride)
        self.headers = slots[:, :_HEADER_BYTES].view(np.uint64)
        self.payloads = slots[:, _HEADER_BYTES:]
        self.acks = self.words[_LINE * 2 :: 2 * _LINE]
        self.beats = self.words[_LINE * 3 :: 2 * _LINE]

    @property
    def closed(self) -> bool:
        return bool(self.words[_LINE])

    def unmap(self) -> None:
        """The mapping holds a descriptor of its own, which should not wait for the collector."""
        del self.words, self.headers, self.payloads, self.acks, self.beats
        self._memory.close()


class StepRing:
    """Rank 0's end. Not thread-safe but for `close`."""

    def __init__(self, consumers: int, *, slots: int = 16, slot_bytes: int = 1 << 16) -> None:
        self._fds = [os.memfd_create("radix-steps")]
        self._fds += [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(consumers)]
        self.handle = RingHandle(self._fds[0], self._fds[1:], slots, slot_bytes)
        self._layout = _Layout(self.handle)
        self._sequence = 0

    def publish(self, frame: bytes, timeout: float = 60.0) -> None:
        """Hands `frame` to every consumer. Raises EngineDeadError when the ring is closed, or when
        it stays full for `timeout` seconds (the text names the slow consumers)."""
        layout = self._layout
        size = self.handle.slot_bytes
        data = np.frombuffer(frame, np.uint8)
        for offset in range(0, max(1, len(data)), size):
            self._wait_for_room(timeout)
            self._sequence += 1
            slot = self._sequence % self.handle.slots
            part = data[offset : offset + size]
            layout.payloads[slot, : len(part)] = part
            layout.headers[slot, :3] = (self._sequence, len(data), offset)
            layout.words[0] = self._sequence  # x86 keeps the order of these stores
            self._wake()

    def _wait_for_room(self, timeout: float) -> None:
        layout = self._layout
        oldest = self._sequence + 1 - self.handle.slots
        start = time.monotonic()
        while True:
            if layout.closed:
                raise EngineDeadError("the step ring is closed")
            behind = [r for r, ack in enumerate(layout.acks.tolist()) if ack < oldest]
            if not behind:
                return
            if time.monotonic() - start > timeout:
                ranks = ", ".join(f"{r + 1} (silent {self.silence(r):.1f} s)" for r in behind)
                raise EngineDeadError(f"worker rank {ranks} took no step in {timeout:g} s")
            time.sleep(_FULL_SLEEP)

    def silence(self, consumer: int) -> float:
        """Seconds since the last sign of life of a consumer; infinite before the first."""
        beat = int(self._layout.beats[consumer])
        return (time.monotonic_ns() - beat) / 1e9 if beat else float("inf")

    def close(self) -> None:
        """Ends every consumer's `receive` with None. Idempotent."""
        if not self._layout.closed:
            self._layout.words[_LINE] = 1
            self._wake()

    def _wake(self) -> None:
        for fd in self.handle.event_fds:
            os.eventfd_write(fd, 1)

    def release(self) -> None:
        """Gives the memory and the descriptors back, after the consumers have gone. Idempotent."""
        if not self._fds:
            return
        self.close()
        self._layout.unmap()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


class StepRingReader:
    """Consumer `index` (rank - 1) of a ring whose descriptors this process has inherited."""

    def __init__(self, handle: RingHandle, index: int) -> None:
        self._layout = _Layout(handle)
        self._index = index
        self._event_fd = handle.event_fds[index]
        self._taken = int(self._layout.acks[index])
        self._poll = select.poll()
        self._poll.register(self._event_fd, select.POLLIN)

    def beat(self) -> None:
        self._layout.beats[self._index] = time.monotonic_ns()

    def receive(self, wake_every: float = 1.0) -> bytes | None:
        """The next frame; None when the ring is closed. Blocks without using the processor and
        writes the heartbeat at least every `wake_every` seconds."""
        frame = bytearray()
        while True:
            if not self._wait_for_slot(wake_every):
                return None
            layout = self._layout
            slot = (self._taken + 1) % layout.handle.slots
            sequence, total, offset = (int(x) for x in layout.headers[slot, :3])
            if sequence != self._taken + 1 or offset != len(frame):
                raise EngineDeadError(
                    f"step ring: slot {sequence} at {offset}, expected {self._taken + 1} at {len(frame)}"
                )
            size = min(total - offset, layout.handle.slot_bytes)
            frame += layout.payloads[slot, :size].tobytes()
            self._taken = sequence
            layout.acks[self._index] = sequence
            if len(frame) == total:
                return bytes(frame)

    def _wait_for_slot(self, wake_every: float) -> bool:
        layout = self._layout
        spin_until = time.monotonic() + _SPIN_SECONDS
        while not layout.closed:
            self.beat()
            if int(layout.words[0]) > self._taken:
                return True
            if time.monotonic() < spin_until:
                continue
            if self._poll.poll(wake_every * 1000):
                with suppress(BlockingIOError):  # drained for an earlier slot
                    os.eventfd_read(self._event_fd)
        return False
