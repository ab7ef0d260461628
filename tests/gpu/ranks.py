"""Groups of ranks, a process and a GPU each, for the checks of collectives."""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from radix_kernels.comm import GpuCommunicator, ShmCommunicator

MAX_BYTES = 8 << 20
LIMIT = 60.0  # seconds; a rank that takes longer shows where it stands


@dataclass
class Rank:
    """What a check gets: the group over shared memory, the GPUs' and this rank's random numbers."""

    shm: ShmCommunicator
    gpu: GpuCommunicator
    device: torch.device

    @property
    def shared(self) -> bool:
        """Several ranks on a GPU."""
        return torch.cuda.device_count() < self.gpu.world_size

    def randn(
        self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0
    ) -> torch.Tensor:
        """What `rank` draws; every rank can make the input of all the others."""
        g = torch.Generator(self.device).manual_seed(1000 * seed + rank)
        return (3 * torch.randn(shape, generator=g, device=self.device)).to(dtype)

    def of_all_ranks(
        self, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0
    ) -> torch.Tensor:
        """[world_size, *shape]: what each rank draws."""
        return torch.stack([self.randn(r, shape, dtype, seed) for r in range(self.gpu.world_size)])

    def same_everywhere(self, tensor: torch.Tensor) -> None:
        """Fails unless every rank holds these bits."""
        mine = tensor.contiguous().cpu().view(torch.uint8).reshape(-1)
        rows = self.shm.all_gather(mine, mine.new_empty(self.shm.world_size, mine.numel()))
        assert all(torch.equal(row, mine) for row in rows), "ranks hold different bits"


def limit(world: int) -> float:
    """LIMIT for each rank that a GPU has: their kernels take turns."""
    return LIMIT * max(1, world // torch.cuda.device_count())


def connect(rank: int, world: int, path: str, timeout: float) -> Rank:
    """Joins the group; a rank that takes longer than its limit prints where it stands."""
    faulthandler.dump_traceback_later(limit(world) - 5)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    shm = ShmCommunicator(name=path, rank=rank, world_size=world, max_bytes=1 << 20, timeout=60.0)
    return Rank(
        shm=shm,
        gpu=GpuCommunicator(shm, device.index, max_bytes=MAX_BYTES, timeout=timeout),
        device=device,
    )


def spawn(world: int, target: Callable[..., None], *args: object, dies: bool = False) -> bool:
    """Runs target(rank, world, path, *args) in `world` processes; whether all ended well (the last
    may die)."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = f"{folder}/group"
        ranks = [
            context.Process(target=target, args=(rank, world, path, *args)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + limit(world)
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        codes = [process.exitcode for process in ranks]
    expected = [0] * (world - 1) + [-signal.SIGKILL if dies else 0]
    if codes != expected:
        print(f"{target.__name__}: exit codes {codes}", flush=True)
    return codes == expected
