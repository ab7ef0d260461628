"""Collectives between processes of one machine over shared memory (CPU tensors)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _loader

if TYPE_CHECKING:
    import torch


class ShmCommunicator:
    """One rank's end of a group of `world_size` processes.

    `name` is the path of a file that every rank can open and map: a file in a private directory of
    /dev/shm, or an inherited memfd as /proc/self/fd/N. It must be new (all zero) and is never
    unlinked here. `max_bytes` is the size of a segment; larger tensors travel in pieces. All ranks
    call the same collectives in the same order with equal shapes and dtypes.

    Tensors are contiguous CPU torch tensors. Sums run in rank order, rank 0 first, in float32 for
    16-bit types (rounded once), so that all ranks hold the same bits. A wait spins for 50 us,
    then sleeps. When a rank calls `abort`, or after `timeout` seconds, waits raise RuntimeError.
    """

    def __init__(self, name: str, rank: int, world_size: int, *, max_bytes: int, timeout: float = 60.0) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, expected 0 <= rank < world_size = {world_size}")
        if max_bytes < 8 or max_bytes % 8:
            raise ValueError(f"max_bytes is {max_bytes}, expected a positive multiple of 8")
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}, expected a positive number of seconds")
        self.rank = rank
        self.world_size = world_size
        group: Any = getattr(_loader.bind, "Comm", None)
        if group is None:
            from .reference.comm import ShmGroup

            group = ShmGroup
        self._group: Any = group(name, rank, world_size, max_bytes, timeout)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns `tensor`."""
        self._group.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out` [world_size, *tensor.shape] receives every rank's tensor; returns `out`."""
        self._group.all_gather(tensor, out)
        return out

    def gather(self, tensor: torch.Tensor, out: torch.Tensor | None = None, root: int = 0) -> torch.Tensor | None:
        """As all_gather, on `root` only; the others pass no `out` and get None."""
        self._check_root(root)
        if self.rank != root:
            self._group.all_gather(tensor, None)
            return None
        if out is None:
            raise ValueError(f"gather: rank {root} is the root and must pass out")
        return self.all_gather(tensor, out)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """The root's bytes, in place; returns `tensor`."""
        self._check_root(root)
        self._group.broadcast(tensor, root)
        return tensor

    def barrier(self, timeout: float | None = None) -> None:
        """Returns when every rank has called it; `timeout` replaces the group's for this call."""
        self._group.barrier(timeout or 0.0)

    def abort(self) -> None:
        """Makes every present and later wait of every rank raise. Idempotent; any thread."""
        group = self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Drops the mapping; the object can do nothing afterwards. Idempotent."""
        self._group = None

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"root is {root}, expected a rank below {self.world_size}")
