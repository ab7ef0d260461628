"""Communicator: the collectives of tensor-parallel ranks, summed in rank order.

Rank 0 lives in the scheduler's process; the others are its children. CPU ranks exchange through
shared memory, GPU ranks through each other's memory. Every wait ends: with CommunicatorAborted when
a rank aborts, with RuntimeError after 60 s."""

import ctypes
import logging
import os
import shutil
import tempfile
import threading
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from . import ops
from .config import ServerArgs
from .device import Device

logger = logging.getLogger(__name__)

_TIMEOUT = 60.0
# What one launch of a collective moves at most.
_SEGMENT_BYTES = 4 << 20  # of hosts
_PEER_BYTES = 8 << 20  # of GPUs
# Rows that the all-reduce with the norm takes: at most so many bytes, in multiples of so many.
_NORM_ROW_BYTES = 32 << 10
_NORM_ROW_STEP = 16
# The CPUs of this process, or fewer under a cgroup's limit: asked before the runtime sets a number.
_DEFAULT_THREADS = ops.get_num_threads()
# Bytes of an all-reduce from which NCCL is faster, by ranks: docs/kernels/all_reduce.md.
_NCCL_FROM = {2: 256 << 20, 4: 128 << 20, 8: 64 << 20}


class CommunicatorAborted(RuntimeError):
    """A rank has aborted the group while this one waited, or before. Why, that rank has said."""


class Communicator:
    """One rank of a group; this class is a group of one. All ranks make the same calls in the same
    order, with equal shapes and dtypes."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a contiguous tensor over the ranks, in place; returns `tensor`."""
        return tensor

    @property
    def fuses_norms(self) -> bool:
        """Whether `all_reduce_add_rmsnorm` is one launch, known once the group is open. Where it is
        not, a rank does better to add the residual in its last product."""
        return False

    def all_reduce_add_rmsnorm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds the sum of `tensor` over the ranks to `residual`, in place; returns the RMSNorm of
        that. tensor, residual: contiguous [T, H] of one floating dtype; weight: [H], of that dtype
        or float32. The memory of `tensor` may become the result."""
        residual.add_(self.all_reduce(tensor))
        return ops.rmsnorm(residual, weight, eps)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[world_size, *tensor.shape], in rank order, on every rank."""
        return tensor.unsqueeze(0)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """[world_size, *tensor.shape], in rank order, on rank 0; None on the others."""
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Gives every rank the values of rank 0, in place."""

    def barrier(self, timeout: float | None = None) -> None:
        """Waits for all ranks, for `timeout` seconds instead of the usual limit."""

    def open(self, device: Device) -> None:
        """Call before the first tensor, on all ranks together, on the thread that will use it."""

    def check(self) -> None:
        """Raises CommunicatorAborted when a rank has aborted, RuntimeError when one has not come in
        time: what the device has computed is then void. Does not wait."""

    def abort(self) -> None:
        """Every present and later wait of every rank raises CommunicatorAborted. Any thread."""

    def close(self) -> None:
        """Gives the group's resources back."""


class _AbortErrors:
    """Within it, a RuntimeError of a group that was aborted becomes CommunicatorAborted. A rank
    that waited too long aborts the group too: its own error stays what it is."""

    def __init__(self, shm: ops.ShmCommunicator) -> None:
        self._shm = shm
        self.aborted_here = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, RuntimeError):
            return
        by = self._shm.aborted_by
        if by is not None and (by != self._shm.rank or self.aborted_here):
            raise CommunicatorAborted(str(error)) from None


class SharedMemory(Communicator):
    """CPU ranks of one machine. `path` names a fresh file that every rank can map."""

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._shm = ops.ShmCommunicator(
            path,
            rank=rank,
            world_size=world_size,
            max_bytes=_SEGMENT_BYTES,
            timeout=_TIMEOUT,
        )
        self._abort_errors = _AbortErrors(self._shm)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._abort_errors:
            return self._shm.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._abort_errors:
            return self._shm.all_gather(tensor.contiguous(), self._for_all_ranks(tensor))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        out = self._for_all_ranks(tensor) if self.rank == 0 else None
        with self._abort_errors:
            return self._shm.gather(tensor.contiguous(), out)

    def broadcast(self, tensor: torch.Tensor) -> None:
        with self._abort_errors:
            self._shm.broadcast(tensor)

    def barrier(self, timeout: float | None = None) -> None:
        with self._abort_errors:
            self._shm.barrier(timeout)

    def check(self) -> None:
        by = self._shm.aborted_by
        if by is not None:
            raise CommunicatorAborted(f"communicator: aborted by rank {by}")

    def abort(self) -> None:
        self._abort_errors.aborted_here = True
        self._shm.abort()

    def close(self) -> None:
        self._shm.close()

    def _for_all_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty((self.world_size, *tensor.shape))


class Gpus(SharedMemory):
    """GPU ranks of one machine. Hosts wait for each other over shared memory; tensors go by our
    kernels, by NCCL from the size where it is faster, and by NCCL alone where a GPU cannot reach
    another's memory. A wait on the device that failed shows in `check`, once the work has
    completed."""

    def __init__(self, path: str, rank: int, world_size: int, *, nccl_only: bool) -> None:
        super().__init__(path, rank, world_size)
        self._nccl_only = nccl_only
        self._peers: Any = None
        self._nccl: Any = None
        self._nccl_abort: threading.Thread | None = None
        self._nccl_lock = threading.Lock()  # of that thread's start
        self._device = torch.device("cuda")

    def open(self, device: Device) -> None:
        self._device = device.torch_device
        if self._nccl_only:
            return
        try:
            with self._abort_errors:
                self._peers = ops.GpuCommunicator(
                    self._shm, self._device.index, max_bytes=_PEER_BYTES, timeout=_TIMEOUT
                )
        except NotImplementedError as error:
            logger.warning("%s: NCCL carries all tensors", error)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._abort_errors:
            if self._goes_by_peers(tensor):
                return self._peers.all_reduce(tensor)
            self._nccl_group().allreduce(tensor).wait()
            return tensor

    @property
    def fuses_norms(self) -> bool:
        return self._peers is not None

    def all_reduce_add_rmsnorm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        row = tensor.shape[-1] * tensor.element_size()
        is_taken = row <= _NORM_ROW_BYTES and row % _NORM_ROW_STEP == 0
        if not (is_taken and self._goes_by_peers(tensor)):
            return super().all_reduce_add_rmsnorm(tensor, residual, weight, eps)
        with self._abort_errors:
            return self._peers.all_reduce_add_rmsnorm(tensor, residual, weight, eps)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        out = self._for_all_ranks(tensor)
        with self._abort_errors:
            if self._goes_by_peers(out):
                return self._peers.all_gather(tensor, out)
            self._nccl_group()._allgather_base(out.view(-1), tensor.view(-1)).wait()
            return out

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        parts = self.all_gather(tensor)
        return parts if self.rank == 0 else None

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.all_gather(tensor)[0])

    def check(self) -> None:
        if self._peers is not None:
            with self._abort_errors:
                self._peers.check()
        super().check()  # the waits of NCCL end without a word

    def abort(self) -> None:
        super().abort()
        self._abort_nccl()

    def _abort_nccl(self) -> None:
        """Ends NCCL's waits on the device. On a thread of its own: it also waits for the graphs
        that hold NCCL's work, which whoever aborts may be the one to release."""
        with self._nccl_lock:
            if self._nccl is None or self._nccl_abort is not None:
                return
            self._nccl_abort = threading.Thread(target=self._nccl.abort, daemon=True)
            self._nccl_abort.start()

    def close(self) -> None:
        self._abort_nccl()
        if self._nccl_abort is not None:
            self._nccl_abort.join(_TIMEOUT)
            if self._nccl_abort.is_alive():
                logger.warning("NCCL has not ended its work within %g s", _TIMEOUT)
            # Never destroyed: torch's destructor would wait, holding the interpreter's lock, for
            # work that no other rank will complete.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._nccl))
        self._peers = None
        self._nccl = None
        super().close()

    def _goes_by_peers(self, tensor: torch.Tensor) -> bool:
        return self._peers is not None and tensor.nbytes < _NCCL_FROM[self.world_size]

    def _nccl_group(self) -> Any:
        """The ranks' NCCL group, made on first use, which is a collective. It is not torch's
        default group: that one is the user's."""
        if self._nccl is None:
            folder = tempfile.mkdtemp(prefix="radix-nccl-") if self.rank == 0 else ""
            try:
                self._nccl = self._made_nccl_group(folder)
                self._nccl.allreduce(torch.zeros(1, device=self._device)).wait()
                self._shm.barrier()  # all have found each other
            finally:
                if folder:
                    shutil.rmtree(folder, ignore_errors=True)
        return self._nccl

    def _made_nccl_group(self, folder: str) -> Any:
        """Of ranks that find each other by a file in rank 0's `folder`; "" on the others."""
        import torch.distributed as dist

        name = torch.zeros(256, dtype=torch.uint8)
        name[: len(folder)] = torch.tensor(list(folder.encode()), dtype=torch.uint8)
        self._shm.broadcast(name)
        path = bytes(name.tolist()).rstrip(b"\0").decode() + "/store"
        store = dist.FileStore(path, self.world_size)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=_TIMEOUT))  # also where rank 0 has gone with its folder
        options = dist.ProcessGroupNCCL.Options()
        return dist.ProcessGroupNCCL(store, rank=self.rank, size=self.world_size, options=options)


def connect(args: ServerArgs, path: str, rank: int, device: Device) -> Communicator:
    """A rank's end of the group over the file `path`; `open` completes it."""
    if device.is_cpu:
        return SharedMemory(path, rank=rank, world_size=args.tp_size)
    return Gpus(path, rank=rank, world_size=args.tp_size, nccl_only=args.disable_custom_all_reduce)


def core_share(
    rank: int, world_size: int, num_threads: int | None = None
) -> tuple[int, frozenset[int] | None]:
    """A rank's number of CPU threads, and the cores that it, and no other rank, is pinned to.

    The cores are None for one rank, for more ranks than threads, and under a cgroup's limit, where
    other containers would choose the same cores."""
    cores = sorted(os.sched_getaffinity(0))
    if rank == 0 and (num_threads or 0) > len(cores):
        logger.warning(
            "--num-threads %d is cut to the %d CPUs that this process may use",
            num_threads,
            len(cores),
        )
    threads = min(num_threads or _DEFAULT_THREADS, len(cores)) // world_size
    if world_size == 1 or threads == 0 or len(cores) > _DEFAULT_THREADS:
        return max(1, threads), None
    return threads, frozenset(cores[rank * threads : (rank + 1) * threads])
