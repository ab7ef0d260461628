"""The shared-memory group in Python: the definition of the native one, and its stand-in.

Every collective is one exchange: each rank copies its bytes into its own segment, publishes its
sequence number and waits until every rank has published the same one; then it reads what it needs
from the segments of the others. Segments are doubled: a rank that publishes exchange n has finished
reading exchange n - 1, so buffer n % 2 may be overwritten at n + 2 without a second barrier.

    word 0             abort flag: the number of the rank that gave up, plus one
    word 8 * (1 + r)   sequence number of rank r (a cache line of its own); the next word belongs to
                       the rank's GPU
    data               [rank][2][max_bytes]

A fresh zero-filled file is the valid first state, so ranks need no rendezvous beyond its path.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_SPIN_SECONDS = 50e-6
_SLEEP_FIRST = 20e-6
_SLEEP_LONGEST = 1e-3
_LINE_WORDS = 8


class ShmGroup:
    """See `radix_kernels.ShmCommunicator`, which checks the arguments of the constructor."""

    def __init__(
        self, name: str, rank: int, world_size: int, max_bytes: int, timeout: float
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._max_bytes = max_bytes
        self._timeout = timeout
        control = 4096 * (1 + (1 + world_size) * _LINE_WORDS * 8 // 4096)
        self._map = _map_file(name, control + world_size * 2 * max_bytes)
        self._words = np.frombuffer(self._map, np.uint64, control // 8)
        data = np.frombuffer(self._map, np.uint8, world_size * 2 * max_bytes, control)
        self._segments = data.reshape(world_size, 2, max_bytes)
        self._sequence = 0
        self.control_address = self._words.ctypes.data

    def all_reduce(self, tensor: torch.Tensor) -> None:
        import torch

        flat = _flat(tensor, "all_reduce")
        wide = flat.dtype in (torch.bfloat16, torch.float16)
        for piece in self._pieces(flat):
            parts = self._exchange(piece)
            total = parts[0].float() if wide else parts[0].clone()
            for part in parts[1:]:
                total += part
            piece.copy_(total)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor | None) -> None:
        flat = _flat(tensor, "all_gather")
        rows = None
        if out is not None:
            expected = (self.world_size, *tensor.shape)
            if tuple(out.shape) != expected or out.dtype != tensor.dtype:
                raise ValueError(
                    f"all_gather: out is {out.dtype} {tuple(out.shape)}, "
                    f"expected {tensor.dtype} {expected}"
                )
            rows = _flat(out, "all_gather").view(self.world_size, -1)
        start = 0
        for piece in self._pieces(flat):
            parts = self._exchange(piece)
            end = start + piece.numel()
            if rows is not None:
                for row, part in zip(rows, parts, strict=True):
                    row[start:end].copy_(part)
            start = end

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        for piece in self._pieces(_flat(tensor, "broadcast")):
            parts = self._exchange(piece, publish=self.rank == root)
            if self.rank != root:
                piece.copy_(parts[root])

    def barrier(self, timeout: float) -> None:
        self._sequence += 1
        self._publish_and_wait(timeout or self._timeout)

    def abort(self) -> None:
        if not self._words[0]:
            self._words[0] = self.rank + 1

    def _pieces(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step = self._max_bytes // flat.element_size()
        if step == 0:
            raise ValueError(
                f"communicator: an element has {flat.element_size()} bytes, "
                f"a segment {self._max_bytes}"
            )
        return flat.split(step) if flat.numel() else ()

    def _exchange(self, piece: torch.Tensor, publish: bool = True) -> list[torch.Tensor]:
        """Publishes `piece` and returns every rank's, as views that live until the exchange after
        the next."""
        import torch

        self._sequence += 1
        side = self._segments[:, self._sequence % 2]
        size = piece.numel() * piece.element_size()
        parts = [torch.from_numpy(s[:size]).view(piece.dtype) for s in side]
        if publish:
            parts[self.rank].copy_(piece)
        self._publish_and_wait(self._timeout)
        return parts

    def _publish_and_wait(self, timeout: float) -> None:
        words = self._words
        words[_LINE_WORDS * (1 + self.rank)] = self._sequence
        sequences = words[_LINE_WORDS : _LINE_WORDS * (1 + self.world_size) : _LINE_WORDS]
        start = time.monotonic()
        pause = _SLEEP_FIRST
        while int(sequences.min()) < self._sequence:
            if words[0]:
                break
            waited = time.monotonic() - start
            if waited > timeout:
                late = np.flatnonzero(sequences < self._sequence).tolist()
                self.abort()
                raise RuntimeError(f"communicator: rank(s) {late} did not arrive in {timeout:g} s")
            if waited > _SPIN_SECONDS:
                time.sleep(pause)
                pause = min(2 * pause, _SLEEP_LONGEST)
        if words[0]:
            raise RuntimeError(f"communicator: aborted by rank {int(words[0]) - 1}")


def _map_file(name: str, size: int) -> mmap.mmap:
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)  # every rank asks for the same size
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _flat(tensor: Any, what: str) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise ValueError(f"{what}: tensor is on {tensor.device}, expected cpu")
    if not tensor.is_contiguous():
        raise ValueError(f"{what}: tensor with strides {tensor.stride()} is not contiguous")
    return tensor.view(-1)
