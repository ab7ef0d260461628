"""One rank of a group of stand-in GPUs: the ROCm library's collectives against their definition.

`python -m tests.gcn.collectives RANK WORLD PATH`; each rank is a process, as on a machine with that
many GPUs. Prints what it checked.
"""

from __future__ import annotations

import sys

import torch

from radix_kernels import reference
from radix_kernels.comm import GpuCommunicator, ShmCommunicator
from tests.gcn import arrays, graphs
from tests.gcn.arrays import Array
from tests.gcn.graphs import Recorder, StreamArray

MAX_BYTES = 1 << 17
SIZES = (1, 13, 1024, 70_000)  # the last takes several launches
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Rank:
    def __init__(self, rank: int, world: int, path: str) -> None:
        self.rank = rank
        self.world = world
        self.shm = ShmCommunicator(
            name=path, rank=rank, world_size=world, max_bytes=1 << 16, timeout=200.0
        )
        self.gpu = GpuCommunicator(self.shm, rank, max_bytes=MAX_BYTES, timeout=150.0)

    def on_gpu(self, x: torch.Tensor) -> Array:
        return Array(x, self.rank)

    def everybodys(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        g = torch.Generator().manual_seed(sum(shape))
        return (3 * torch.randn(self.world, *shape, generator=g)).to(dtype)


def check_sums(r: Rank) -> int:
    count = 0
    for dtype in DTYPES:
        for n in SIZES:
            everybodys = r.everybodys((n,), dtype)
            want = reference.all_reduce(everybodys, compute_dtype=torch.float32)
            for algorithm in ("one_shot", "two_shot"):
                x = everybodys[r.rank].clone()
                r.gpu.all_reduce(r.on_gpu(x), algorithm=algorithm)
                arrays.close_memory()
                assert torch.equal(x, want), (dtype, n, algorithm)
                count += 1
    return count


def check_gather_and_scatter(r: Rank) -> int:
    for dtype in DTYPES:
        everybodys = r.everybodys((r.world * 40,), dtype)
        mine = everybodys[r.rank].clone()
        part = torch.full((40,), float("nan"), dtype=dtype)
        r.gpu.reduce_scatter(r.on_gpu(mine.view(r.world, 40)), r.on_gpu(part))
        want = reference.all_reduce(everybodys, compute_dtype=torch.float32)
        assert torch.equal(part, want.view(r.world, -1)[r.rank])
        out = torch.full((r.world, r.world * 40), float("nan"), dtype=dtype)
        r.gpu.all_gather(r.on_gpu(mine), r.on_gpu(out))
        arrays.close_memory()
        assert torch.equal(out, everybodys)
    return 2 * len(DTYPES)


def check_norm(r: Rank) -> int:
    count = 0
    for dtype in DTYPES:
        everybodys = r.everybodys((3, 64), dtype)
        g = torch.Generator().manual_seed(7)
        residual = torch.randn(3, 64, generator=g).to(dtype)
        weight = torch.randn(64, generator=g).to(dtype)
        want_residual, want = reference.all_reduce_add_rmsnorm(
            everybodys, residual, weight, 1e-5, compute_dtype=torch.float64
        )
        for algorithm in ("one_shot", "two_shot"):
            x = everybodys[r.rank].clone()
            mine = residual.clone()
            given = (r.on_gpu(t) for t in (x, mine, weight))
            r.gpu.all_reduce_add_rmsnorm(*given, 1e-5, algorithm=algorithm)
            arrays.close_memory()
            assert torch.equal(mine, want_residual)
            error = float((x.double() - want.double()).norm() / want.double().norm())
            assert error < {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}[dtype]
            count += 1
    return count


def check_graph(r: Rank) -> int:
    """A captured sum serves other values: what ranks tell each other follows from device memory."""
    shape = (1000,)
    with graphs.streams() as stream:
        x = torch.zeros(shape, dtype=torch.bfloat16)
        given = StreamArray(x, r.rank)
        r.gpu.all_reduce(given)
        replay, _ = Recorder(stream).record(lambda: r.gpu.all_reduce(given))
        for seed in (1, 2):
            g = torch.Generator().manual_seed(seed)
            everybodys = torch.randn(r.world, *shape, generator=g).bfloat16()
            x.copy_(everybodys[r.rank])
            replay()
            want = reference.all_reduce(everybodys, compute_dtype=torch.float32)
            assert torch.equal(x, want), seed
    return 2


def main() -> None:
    torch.set_num_threads(1)
    r = Rank(rank=int(sys.argv[1]), world=int(sys.argv[2]), path=sys.argv[3])
    sums = check_sums(r)
    moved = check_gather_and_scatter(r)
    norms = check_norm(r)
    replays = check_graph(r)
    r.gpu.check()
    r.shm.barrier()
    r.gpu.close()
    print(f"{sums} sums, {moved} gathered or scattered, {norms} norms, {replays} replays")


if __name__ == "__main__":
    main()
