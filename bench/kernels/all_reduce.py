"""All-reduce between the GPUs of this machine: a process a rank, graphs of 20 and 100 calls on
distinct buffers.

    python -m bench.kernels all_reduce --ranks 2 4 --sizes 8192 262144 [--json F]

A time is the difference of the two graphs over 80 calls, the largest over the ranks, the median of
rounds in which the contenders take turns. NCCL, torch's symmetric memory (no multicast) and, with
`--peers`, vLLM's custom all-reduce are captured and timed the same way. `--sweep` tries launches
and algorithms instead: from it come the tables of csrc/gpu/comm/all_reduce_plan.h and of the
runtime.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import radix_kernels as rk
from radix_kernels.comm import GpuCommunicator, ShmCommunicator

from . import peers
from .harness import Timing

FEW = 20
MANY = 100
ROUNDS = 9
ROTATED_BYTES = 512 << 20  # at most this much in distinct buffers
SIZES = (8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 128 << 20, 256 << 20)
NORMS = ((1, 8192), (16, 8192), (64, 8192), (256, 8192))
_SYMMETRIC_SETS = 8  # distinct buffers; each needs a rendezvous
_SYMMETRIC_BYTES = 4 << 20  # the largest tensor

# vLLM's own values.
_VLLM_BYTES = 8 << 20
_VLLM_BLOCKS = 36


@dataclass
class Contender:
    """`call(i)` runs the op on buffer set i of `sets`; `captured` runs after each capture."""

    name: str
    call: Callable[[int], Any]
    sets: int
    captured: Callable[[], None] = lambda: None


@dataclass
class Rank:
    """What a measurement gets: this rank's group over shared memory, its GPUs', and its device."""

    shm: ShmCommunicator
    gpu: GpuCommunicator
    device: torch.device

    def measure(self, contenders: Iterable[Contender]) -> dict[str, Timing]:
        """Of one call on the slowest rank, the contenders in turns; who cannot run is left out."""
        graphs: dict[str, list[torch.cuda.CUDAGraph]] = {}
        for one in contenders:
            try:
                graphs[one.name] = [self._capture(one, count) for count in (FEW, MANY)]
            except (RuntimeError, ValueError) as error:
                # For one, a size that it does not take: that costs a contender, not the run.
                if self.shm.rank == 0:
                    reason = str(error).partition("\n")[0]
                    print(f"not measured: {one.name}: {reason}", file=sys.stderr)
        slopes: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(ROUNDS):
            for name, (few, many) in graphs.items():
                slopes[name].append((self._replay(many) - self._replay(few)) / (MANY - FEW))
        return {name: Timing.of(self._slowest(mine), "slope") for name, mine in slopes.items()}

    def _slowest(self, seconds: list[float]) -> list[float]:
        mine = torch.tensor(seconds, dtype=torch.float64)
        by_rank = mine.new_empty(self.shm.world_size, len(seconds))
        self.shm.all_gather(mine, by_rank)
        return by_rank.amax(0).tolist()

    def _capture(self, one: Contender, count: int) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(2):
                one.call(i % one.sets)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                one.call(i % one.sets)
        one.captured()
        self._replay(graph)
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.shm.barrier()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def buffers(size: int, device: torch.device) -> list[torch.Tensor]:
    """Distinct bfloat16 buffers of `size` bytes, as many as ROTATED_BYTES and a graph's calls
    allow."""
    count = max(2, min(MANY, ROTATED_BYTES // size))
    return [torch.randn(size // 2, device=device).to(torch.bfloat16) for _ in range(count)]


def sums(rank: Rank, size: int) -> Iterator[Contender]:
    """Of an all-reduce of `size` bytes of bfloat16."""
    data = buffers(size, rank.device)
    yield Contender(name="radix", call=lambda i: rank.gpu.all_reduce(data[i]), sets=len(data))
    yield Contender(name="NCCL", call=lambda i: dist.all_reduce(data[i]), sets=len(data))
    vllm = VllmCustom.of(rank)
    if vllm is not None and size <= _VLLM_BYTES:
        yield Contender(
            name="vLLM custom",
            call=lambda i: vllm.all_reduce(data[i]),
            sets=len(data),
            captured=vllm.captured,
        )
    if size <= _SYMMETRIC_BYTES:
        yield from symmetric_memory(rank, size)


class VllmCustom:
    """vLLM's custom all-reduce as FlashInfer ships it, out of place. A graph's inputs are
    registered after its capture, as vLLM does it."""

    _made: ClassVar[VllmCustom | None] = None

    def __init__(self, comm: Any, rank: Rank) -> None:
        self._comm = comm
        signals = comm.create_shared_buffer(comm.vllm_meta_size() + _VLLM_BYTES)
        self._data = torch.empty(_VLLM_BYTES, dtype=torch.uint8, device=rank.device)
        self._handle = comm.vllm_init_custom_ar(signals, self._data, rank.shm.rank, True)

    @classmethod
    def of(cls, rank: Rank) -> VllmCustom | None:
        """The process's own; None without `--peers`, or where FlashInfer is not installed."""
        comm = peers.load("flashinfer.comm")
        if cls._made is None and comm is not None:
            try:
                cls._made = cls(comm, rank)
            except Exception as error:  # a peer that cannot start is no peer, whatever it raises
                print(f"no vLLM custom all-reduce: {error}", file=sys.stderr)
                peers.disable()
        return cls._made

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        if torch.cuda.is_current_stream_capturing():  # before, its inputs are unknown to the others
            self._comm.vllm_all_reduce(self._handle, x, out, 0, 0, _VLLM_BLOCKS)
        return out

    def captured(self) -> None:
        mine = self._comm.vllm_get_graph_buffer_ipc_meta(self._handle)
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, mine)
        handles = [list(handle) for handle, _ in by_rank]
        offsets = [list(offset) for _, offset in by_rank]
        self._comm.vllm_register_graph_buffers(self._handle, handles, offsets)


def symmetric_memory(rank: Rank, size: int) -> Iterator[Contender]:
    """torch's one-shot and two-shot all-reduce of `size` bytes over symmetric memory."""
    import torch.distributed._symmetric_memory as symm

    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    count = _SYMMETRIC_SETS
    data = [
        symm.empty(size // 2, device=rank.device, dtype=torch.bfloat16).normal_()
        for _ in range(count)
    ]
    for x in data:
        symm.rendezvous(x, name)
    ops = torch.ops.symm_mem
    yield Contender(
        name="symmetric memory one shot",
        call=lambda i: ops.one_shot_all_reduce(data[i], "sum", name),
        sets=count,
    )
    yield Contender(
        name="symmetric memory two shots",
        call=lambda i: ops.two_shot_all_reduce_(data[i], "sum", name),
        sets=count,
    )


def norms(rank: Rank, rows: int, hidden: int) -> Iterator[Contender]:
    """Of all-reduce, residual add and RMSNorm of bfloat16 [rows, hidden]; the peers with our
    fused_add_rmsnorm."""
    vllm = VllmCustom.of(rank)
    data = [x.view(rows, hidden) for x in buffers(2 * rows * hidden, rank.device)]
    residual = [torch.randn_like(x) for x in data]
    weight = torch.randn(hidden, device=rank.device).to(torch.bfloat16)
    scale = torch.empty(rows, 1, device=rank.device)
    fp8 = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=rank.device)

    def split(reduce: Callable[[torch.Tensor], torch.Tensor | None], i: int) -> None:
        reduced = reduce(data[i])
        rk.fused_add_rmsnorm(data[i] if reduced is None else reduced, residual[i], weight, 1e-6)

    fused = rank.gpu.all_reduce_add_rmsnorm
    count = len(data)
    yield Contender(name="radix", call=lambda i: fused(data[i], residual[i], weight), sets=count)
    yield Contender(
        name="radix to FP8",
        call=lambda i: fused(data[i], residual[i], weight, out=fp8, scale=scale),
        sets=count,
    )
    yield Contender(
        name="radix in two ops", call=lambda i: split(rank.gpu.all_reduce, i), sets=count
    )
    yield Contender(name="NCCL + norm", call=lambda i: split(dist.all_reduce, i), sets=count)
    if vllm is not None:
        yield Contender(
            name="vLLM custom + norm",
            call=lambda i: split(vllm.all_reduce, i),
            sets=count,
            captured=vllm.captured,
        )


def sweep(rank: Rank, size: int) -> Iterator[Contender]:
    """Our all-reduce of `size` bytes by every algorithm and every launch that fits."""
    data = buffers(size, rank.device)
    for algorithm in ("one_shot", "two_shot"):
        for threads in (128, 256, 512):
            for blocks in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128):
                round_bytes = blocks * threads * 16
                too_many = blocks > 1 and round_bytes > 2 * size
                too_few = round_bytes * 64 < size
                if too_many or too_few:
                    continue

                def call(
                    i: int, algorithm: str = algorithm, blocks: int = blocks, threads: int = threads
                ) -> None:
                    rank.gpu.all_reduce(
                        data[i], algorithm=algorithm, blocks=blocks, threads=threads
                    )

                yield Contender(name=f"{algorithm} {blocks}x{threads}", call=call, sets=len(data))


def measure(number: int, world: int, folder: str, args: argparse.Namespace) -> None:
    """The main function of a rank's process; rank 0 leaves the rows in `folder`/rows.json."""
    if args.peers:
        peers.enable()
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=number,
        world_size=world,
        device_id=device,
    )
    shm = ShmCommunicator(name=f"{folder}/group", rank=number, world_size=world, max_bytes=1 << 16)
    rank = Rank(shm=shm, gpu=GpuCommunicator(shm, device.index), device=device)
    rows: list[dict[str, Any]] = []

    def record(op: str, shape: str, contenders: Iterator[Contender]) -> None:
        times = rank.measure(contenders)
        microseconds = {name: vars(timing) for name, timing in times.items()}
        rows.append({"op": op, "shape": shape, "microseconds": microseconds})
        if number == 0:
            medians = "  ".join(f"{name} {timing.median_us:.1f}" for name, timing in times.items())
            print(f"{op:24s}{shape:16s}", medians, flush=True)
            if args.sweep:
                best = min(times, key=lambda name: times[name].median_us)
                print(f"{op:24s}{shape:16s} best: {best} {times[best].median_us:.2f}", flush=True)

    for size in args.sizes:
        contenders = sweep(rank, size) if args.sweep else sums(rank, size)
        record("all_reduce", f"TP{world} {size >> 10} KiB", contenders)
    if not args.sweep and not args.no_norms:
        for tokens, hidden in NORMS:
            shape = f"TP{world} {tokens}x{hidden}"
            record("all_reduce_add_rmsnorm", shape, norms(rank, tokens, hidden))
    rank.gpu.check()
    shm.barrier()
    if number == 0:
        Path(f"{folder}/rows.json").write_text(json.dumps(rows))
    sys.stdout.flush()
    os._exit(0)  # NCCL's teardown waits for graphs that hold its work


def run(world: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one group of `world` ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ranks = [
            context.Process(target=measure, args=(number, world, folder, args))
            for number in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"TP{world}: exit codes {[process.exitcode for process in ranks]}")
        rows: list[dict[str, Any]] = json.loads(Path(f"{folder}/rows.json").read_text())
        return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; `arguments` instead of sys.argv for the bench's own command."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels all_reduce", description=__doc__)
    parser.add_argument("--backend", default="cuda", choices=("cuda",))
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=None, help="group sizes; default: all that fit"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument(
        "--peers", action="store_true", help="compare with FlashInfer's vLLM all-reduce too"
    )
    parser.add_argument("--no-norms", action="store_true", help="leave the fused op out")
    parser.add_argument("--sweep", action="store_true", help="try launches and algorithms of ours")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args(arguments)


def main(args: argparse.Namespace) -> None:
    gpus = torch.cuda.device_count()
    print(
        f"{date.today()}  {gpus} x {torch.cuda.get_device_name()}  radix-kernels {rk.__version__}  "
        f"torch {torch.__version__}  NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}\n"
        "microseconds, the slowest rank"
    )
    worlds = args.ranks or [n for n in (2, 4, 8) if n <= gpus]
    rows = [row for world in worlds for row in run(world, args)]
    if args.json:
        report = {
            "date": str(date.today()),
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "rows": rows,
        }
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(parse())
