"""Communicator: what tensor-parallel ranks say to each other, in a fixed rank order.

Rank 0 lives in the scheduler's process; the others are its children. CPU ranks exchange through shared memory; every
wait ends with RuntimeError when a rank aborts or 60 s have passed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from . import ops

COLLECTIVE_TIMEOUT = 60.0
_SEGMENT_BYTES = 4 << 20


class Communicator:
    """A rank of a group; this class is the group of one. All ranks call the same collectives in the same order with
    equal shapes and dtypes."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place (contiguous); returns `tensor`."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[world_size, *tensor.shape], rank order, on every rank."""
        return tensor.unsqueeze(0)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """[world_size, *tensor.shape] on rank 0, None elsewhere."""
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's values, in place."""

    def barrier(self, timeout: float | None = None) -> None:
        """Waits for all ranks, `timeout` seconds instead of the usual limit."""

    def abort(self) -> None:
        """Every present and later wait of every rank raises RuntimeError. Any thread."""

    def close(self) -> None:
        """Gives the group's resources back."""


class SharedMemory(Communicator):
    """CPU ranks of one machine. `path` names a fresh file that every rank can map."""

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._shm = ops.ShmCommunicator(path, rank, world_size, max_bytes=_SEGMENT_BYTES, timeout=COLLECTIVE_TIMEOUT)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._shm.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._shm.all_gather(tensor.contiguous(), self._room(tensor))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._shm.gather(tensor.contiguous(), self._room(tensor) if self.rank == 0 else None)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._shm.broadcast(tensor)

    def barrier(self, timeout: float | None = None) -> None:
        self._shm.barrier(timeout)

    def abort(self) -> None:
        self._shm.abort()

    def close(self) -> None:
        self._shm.close()

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty((self.world_size, *tensor.shape))


class CoreShare(NamedTuple):
    """The CPU threads of a rank; `cores` is the set it is pinned to, None where it is not."""

    threads: int
    cores: frozenset[int] | None


def core_share(
    rank: int, world_size: int, num_threads: int | None = None, cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")
) -> CoreShare:
    """Splits the cores of this process between the ranks: disjoint cores; with too few of them fewer threads; with
    fewer cores than ranks one thread each and no pinning. Under a cgroup quota nobody is pinned: other containers would
    choose the same cores."""
    cores = sorted(os.sched_getaffinity(0))
    limit, period = cpu_max.read_text().split() if cpu_max.is_file() else ("max", "")
    allowed = len(cores) if limit == "max" else -(-int(limit) // int(period))
    threads = min(num_threads or allowed, len(cores)) // world_size
    if threads == 0 or world_size == 1 or limit != "max":
        return CoreShare(max(1, threads), None)
    return CoreShare(threads, frozenset(cores[rank * threads : (rank + 1) * threads]))
