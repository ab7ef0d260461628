"""Communicator: what tensor-parallel ranks say to each other, in a fixed rank order.

Rank 0 lives in the scheduler's process; the others are its children. CPU ranks exchange through
shared memory, GPU ranks through each other's memory; every wait ends with RuntimeError when a rank
aborts or 60 s have passed."""

import ctypes
import logging
import os
import shutil
import tempfile
from typing import Any

import torch

from . import ops
from .config import ServerArgs
from .device import Device

logger = logging.getLogger(__name__)

_TIMEOUT = 60.0
_SEGMENT_BYTES, _PEER_BYTES = (
    4 << 20,
    8 << 20,
)  # what one launch of a collective moves: of hosts, of GPUs
# The CPUs of this process, or fewer under a cgroup's limit: asked before the runtime sets a number.
_DEFAULT_THREADS = ops.get_num_threads()
# Bytes of an all-reduce from which NCCL is faster, by ranks: docs/kernels/all_reduce.md.
_NCCL_FROM = {2: 256 << 20, 4: 128 << 20, 8: 64 << 20}


class Communicator:
    """A rank; this class is a group of one. All ranks make the same calls in order, with equal
    shapes and dtypes."""

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

    def open(self, device: Device) -> None:
        """Before the first tensor, by all ranks together, on the thread that will use it."""

    def check(self) -> None:
        """Raises RuntimeError when what a device has done is void: a rank has died, aborted or not
        come."""

    def abort(self) -> None:
        """Every present and later wait of every rank raises RuntimeError. Any thread."""

    def close(self) -> None:
        """Gives the group's resources back."""


class SharedMemory(Communicator):
    """CPU ranks of one machine. `path` names a fresh file that every rank can map."""

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._shm = ops.ShmCommunicator(
            path, rank, world_size, max_bytes=_SEGMENT_BYTES, timeout=_TIMEOUT
        )

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


class Gpus(SharedMemory):
    """GPU ranks of one machine: hosts wait for each other over shared memory, tensors go by our
    kernels; by NCCL from the size where it is faster, and always where a GPU cannot reach another's
    memory. A wait on the device shows in `check`, after the work has completed."""

    def __init__(self, path: str, rank: int, world_size: int, *, nccl_only: bool) -> None:
        super().__init__(path, rank, world_size)
        self._nccl_only = nccl_only
        self._peers: Any = None
        self._nccl: Any = None
        self._device = torch.device("cuda")

    def open(self, device: Device) -> None:
        self._device = device.torch_device
        if self._nccl_only:
            return
        try:
            self._peers = ops.GpuCommunicator(
                self._shm, self._device.index, max_bytes=_PEER_BYTES, timeout=_TIMEOUT
            )
        except NotImplementedError as error:
            logger.warning("%s: NCCL carries all tensors", error)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._by_peers(tensor):
            return self._peers.all_reduce(tensor)
        self._group().allreduce(tensor).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor, out = tensor.contiguous(), self._room(tensor)
        if self._by_peers(out):
            return self._peers.all_gather(tensor, out)
        self._group()._allgather_base(out.view(-1), tensor.view(-1)).wait()
        return out

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        parts = self.all_gather(tensor)
        return parts if self.rank == 0 else None

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.all_gather(tensor)[0])

    def check(self) -> None:
        if self._peers is not None:
            self._peers.check()

    def abort(self) -> None:
        super().abort()
        if self._nccl is not None:
            self._nccl.abort()

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.abort()
            # Never destroyed: torch's destructor waits, with the interpreter's lock, for what does
            # not come any more.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._nccl))
        self._peers = self._nccl = None
        super().close()

    def _by_peers(self, tensor: torch.Tensor) -> bool:
        return self._peers is not None and tensor.nbytes < _NCCL_FROM[self.world_size]

    # The ranks' NCCL group, made on first use: a collective. Not torch's default group: that is the
    # user's.
    def _group(self) -> Any:
        if self._nccl is None:
            import torch.distributed as dist

            name = torch.zeros(256, dtype=torch.uint8)
            folder = tempfile.mkdtemp(prefix="radix-nccl-") if self.rank == 0 else ""
            name[: len(folder)] = torch.tensor(list(folder.encode()), dtype=torch.uint8)
            self._shm.broadcast(name)
            path = bytes(name.tolist()).rstrip(b"\0").decode() + "/store"
            store = dist.FileStore(path, self.world_size)  # type: ignore[attr-defined]
            self._nccl = dist.ProcessGroupNCCL(
                store, self.rank, self.world_size, dist.ProcessGroupNCCL.Options()
            )
            self._nccl.allreduce(torch.zeros(1, device=self._device)).wait()
            self._shm.barrier()
            shutil.rmtree(folder, ignore_errors=True)
        return self._nccl


def connect(args: ServerArgs, path: str, rank: int, device: Device) -> Communicator:
    """A rank's end of the group over the file `path`; `open` completes it."""
    if device.is_cpu:
        return SharedMemory(path, rank, args.tp_size)
    return Gpus(path, rank, args.tp_size, nccl_only=args.disable_custom_all_reduce)


def core_share(
    rank: int, world_size: int, num_threads: int | None = None
) -> tuple[int, frozenset[int] | None]:
    """A rank's CPU threads and the cores, no other rank's, that it is pinned to. None: one rank,
    more ranks than threads, or a cgroup's limit, under which other containers would choose the same
    cores."""
    cores = sorted(os.sched_getaffinity(0))
    if rank == 0 and (num_threads or 0) > len(cores):
        logger.warning(
            "--num-threads %d is cut to the %d CPUs that this process may use",
            num_threads,
            len(cores),
        )
    threads = min(num_threads or _DEFAULT_THREADS, len(cores)) // world_size
    pinned = threads > 0 and world_size > 1 and _DEFAULT_THREADS >= len(cores)
    return max(1, threads), frozenset(
        cores[rank * threads : (rank + 1) * threads]
    ) if pinned else None
