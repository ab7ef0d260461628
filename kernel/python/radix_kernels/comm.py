"""Collectives between processes of one machine: over shared memory (CPU tensors), between GPUs over
peer memory."""

from __future__ import annotations

import mmap
import sys
from typing import Any

from . import _loader
from ._lazy import torch

_FLAG_BYTES = 8  # the file's first word: the rank that aborted, plus one (radix_kernels/comm.h)


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

    def __init__(
        self, name: str, rank: int, world_size: int, *, max_bytes: int, timeout: float = 60.0
    ) -> None:
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
            # Imports numpy, which the native group does not need.
            from .reference.comm import ShmGroup

            group = ShmGroup
        self._group: Any = group(name, rank, world_size, max_bytes, timeout)
        with open(name, "rb") as file:
            self._abort_flag = mmap.mmap(file.fileno(), _FLAG_BYTES, access=mmap.ACCESS_READ)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns `tensor`."""
        self._group.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out` [world_size, *tensor.shape] receives every rank's tensor; returns `out`."""
        self._group.all_gather(tensor, out)
        return out

    def gather(
        self, tensor: torch.Tensor, out: torch.Tensor | None = None, root: int = 0
    ) -> torch.Tensor | None:
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
        self._abort_flag.close()

    @property
    def aborted_by(self) -> int | None:
        """The rank that aborted the group, by `abort` or after a timeout; None: nobody has, or this
        end is closed. Does not wait."""
        if self._group is None:
            return None
        flag = int.from_bytes(self._abort_flag[:_FLAG_BYTES], sys.byteorder)
        return flag - 1 if flag else None

    @property
    def control_address(self) -> int:
        """Where the control page (abort flag, sequence numbers) is mapped."""
        return int(self._group.control_address)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"root is {root}, expected a rank below {self.world_size}")


_ALGORITHMS = {"auto": 0, "one_shot": 1, "two_shot": 2}

# What ranks tell each other while they connect: whether there is a problem, the handle's length,
# then the handle or the problem's text.
_MESSAGE_BYTES = 512
_HEADER_BYTES = 2


class GpuCommunicator:
    """One rank's end of a group of 2, 4 or 8 GPUs of one machine that reach each other's memory;
    one process per rank.

    `group` is the ranks' ShmCommunicator (it carries the handles and the abort flag, and must
    outlive this object), `device` the index of this process's GPU. All ranks construct it together.
    It owns `4 * max_bytes` of device memory that no framework knows of: processes can share whole
    allocations only. `max_bytes` is what one launch moves at most; larger tensors take several.

    Tensors are contiguous, on that GPU. All ranks call the same collectives in the same order with
    equal shapes and dtypes, each rank on one stream (or streams that wait for each other). Nothing
    is allocated and the host waits for nothing; calls may be captured in CUDA graphs. Sums run in
    rank order, rank 0 first, in float32, rounded once: all ranks hold the same bits, whichever
    algorithm ran.

    When a rank calls `abort`, or a wait on the device has taken `timeout` seconds, everything later
    is void and `check` raises RuntimeError. NotImplementedError (on all ranks): no kernels here,
    another number of ranks, a GPU that cannot reach another's memory. ValueError, TypeError: as
    every op.
    """

    def __init__(
        self,
        group: ShmCommunicator,
        device: int,
        *,
        max_bytes: int = 8 << 20,
        timeout: float = 60.0,
    ) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._group = group
        self._comm: Any = None
        handle = b""
        problem = ""
        try:
            make = getattr(_loader.bind, "GpuComm", None)
            if make is None:
                raise NotImplementedError(
                    _loader.reason or f"the {_loader.backend} library has no GPU collectives"
                )
            self._comm = make(
                group.control_address, device, self.rank, self.world_size, max_bytes, timeout
            )
            handle = self._comm.handle()
        except (NotImplementedError, RuntimeError) as error:
            problem = str(error)
        handles = self._exchange(handle, problem)
        try:
            self._comm.connect(b"".join(handles))
        except NotImplementedError as error:
            problem = str(error)
        self._exchange(b"", problem)

    def _exchange(self, handle: bytes, problem: str) -> list[bytes]:
        """Every rank's handle; NotImplementedError on all ranks when one has a problem."""
        mine = torch.frombuffer(_pack_message(handle, problem), dtype=torch.uint8)
        gathered = self._group.all_gather(mine, mine.new_empty(self.world_size, _MESSAGE_BYTES))
        handles = []
        for rank, row in enumerate(gathered):
            their_handle, their_problem = _unpack_message(bytes(row.tolist()))
            if their_problem:
                self._comm = None
                raise NotImplementedError(f"GPU collectives, rank {rank}: {their_problem}")
            handles.append(their_handle)
        return handles

    def all_reduce(
        self,
        input: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        algorithm: str = "auto",
        blocks: int = 0,
        threads: int = 0,
    ) -> torch.Tensor:
        """Sum over the ranks; bfloat16, float16 or float32. In place without `out`; returns it.

        algorithm: `one_shot` (one hop, all data to all ranks), `two_shot` (fewer bytes, two hops)
        or `auto`, what was measured to be faster for the size. blocks, threads: the launch, for
        measurements; 0 is ours.
        """
        out = input if out is None else out
        self._comm.all_reduce(input, _algorithm(algorithm), blocks, threads, out)
        return out

    def all_reduce_add_rmsnorm(
        self,
        input: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        *,
        out: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        algorithm: str = "auto",
        blocks: int = 0,
    ) -> torch.Tensor:
        """`residual += all_reduce(input); out = rmsnorm(residual) * weight` in one launch, the
        norm that of the new residual before it is rounded; returns out.

        input, residual: [..., H] of one floating dtype, 16-byte aligned, rows of at most 32 KiB in
        multiples of 16 bytes. weight: [H], input's dtype or float32. out: as input (default: input
        itself), or float8_e4m3fn with `scale`, float32 [..., 1] or [..., H / 128]: out * scale is
        the norm, scale = max(largest of the group, 1e-10) / 448. The sums and the residual have the
        bits of `all_reduce` and an add; the norm is that of `rmsnorm` within its tolerance, the
        same bits on every rank.
        """
        out = input if out is None else out
        self._comm.all_reduce_add_rmsnorm(
            input, residual, weight, eps, _algorithm(algorithm), blocks, out, scale
        )
        return out

    def reduce_scatter(
        self, input: torch.Tensor, out: torch.Tensor, *, blocks: int = 0
    ) -> torch.Tensor:
        """`out` receives the sum over the ranks of their `input[rank]`; input [world_size,
        *out.shape]. Returns out."""
        self._comm.reduce_scatter(input, blocks, out)
        return out

    def all_gather(
        self, input: torch.Tensor, out: torch.Tensor, *, blocks: int = 0
    ) -> torch.Tensor:
        """`out` [world_size, *input.shape] receives every rank's tensor bit for bit, any dtype;
        returns out. For small tensors: two bytes travel for each."""
        self._comm.all_gather(input, blocks, out)
        return out

    def check(self) -> None:
        """Raises RuntimeError when the group was aborted or a rank did not arrive. Does not wait:
        call it when the work of interest is done."""
        if self._comm is not None:
            self._comm.check()

    def abort(self) -> None:
        """Ends every present and later wait of every rank, on the host and on the GPUs. Idempotent;
        any thread."""
        self._group.abort()

    def close(self) -> None:
        """Gives the memory back. When no rank has work in flight. Idempotent."""
        self._comm = None


def _pack_message(handle: bytes, problem: str) -> bytearray:
    room = _MESSAGE_BYTES - _HEADER_BYTES
    body = handle or problem.encode()[:room]
    has_problem = 1 if problem else 0
    return bytearray([has_problem, len(handle), *body.ljust(room, b"\0")])


def _unpack_message(message: bytes) -> tuple[bytes, str]:
    """(handle, problem), of which one is empty."""
    has_problem, length = message[:_HEADER_BYTES]
    body = message[_HEADER_BYTES:]
    if has_problem:
        return b"", body.rstrip(b"\0").decode()
    return body[:length], ""


def _algorithm(name: str) -> int:
    if name not in _ALGORITHMS:
        raise ValueError(f"algorithm is {name!r}, expected one of {', '.join(_ALGORITHMS)}")
    return _ALGORITHMS[name]
