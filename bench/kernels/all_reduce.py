"""All-reduce between the GPUs of this machine: a process a rank, graphs of 20 and 100 calls on distinct buffers.

    python -m bench.kernels all_reduce --ranks 2 4 --sizes 8192 262144 [--json F]

A time is the difference of the two graphs' medians over 80 calls, the largest over the ranks. NCCL, torch's symmetric
memory (no multicast) and, with `--peers`, vLLM's custom all-reduce are captured and timed the same way. `--sweep` tries
launches and algorithms instead: from it come the tables of csrc/gpu/all_reduce_plan.h and of the runtime.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import radix_kernels as rk
from radix_kernels.comm import GpuCommunicator, ShmCommunicator

from . import peers

FEW, MANY, ROUNDS = 20, 100, 9
ROTATED_BYTES = 512 << 20  # at most this much in distinct buffers
SIZES = (8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 128 << 20, 256 << 20)
NORMS = ((1, 8192), (16, 8192), (64, 8192), (256, 8192))
_SYMMETRIC_SETS, _SYMMETRIC_BYTES = 8, 4 << 20  # distinct buffers, each needs a rendezvous; largest tensor

_VLLM_BYTES, _VLLM_BLOCKS = 8 << 20, 36  # what vLLM gives its own
Call = Callable[[int], Any]  # runs the op on buffer set i


@dataclass
class Rank:
    shm: ShmCommunicator
    gpu: GpuCommunicator
    device: torch.device

    def microseconds(self, call: Call, sets: int, captured: Callable[[], None] = lambda: None) -> float:
        """Of one call on the slowest rank; NaN where it cannot run. `captured` runs after each capture."""
        try:
            graphs = [self._capture(call, sets, count, captured) for count in (FEW, MANY)]
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if self.shm.rank == 0:
                print(f"not measured: {str(error).splitlines()[0]}", file=sys.stderr)
            return float("nan")
        few, many = (statistics.median(self._replay(graph) for _ in range(ROUNDS)) for graph in graphs)
        mine = torch.tensor([(many - few) / (MANY - FEW)], dtype=torch.float64)
        return float(self.shm.all_gather(mine, mine.new_empty(self.shm.world_size, 1)).max())

    def _capture(self, call: Call, sets: int, count: int, captured: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(2):
                call(i % sets)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                call(i % sets)
        captured()
        self._replay(graph)
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.shm.barrier()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


def buffers(size: int, device: torch.device) -> list[torch.Tensor]:
    count = max(2, min(MANY, ROTATED_BYTES // size))
    return [torch.randn(size // 2, device=device).to(torch.bfloat16) for _ in range(count)]


def sums(rank: Rank, size: int) -> Iterator[tuple[str, float]]:
    """(contender, microseconds) for an all-reduce of `size` bytes of bfloat16."""
    data = buffers(size, rank.device)
    yield "radix", rank.microseconds(lambda i: rank.gpu.all_reduce(data[i]), len(data))
    yield "NCCL", rank.microseconds(lambda i: dist.all_reduce(data[i]), len(data))
    vllm = VllmCustom.of(rank)
    if vllm is not None and size <= _VLLM_BYTES:
        yield "vLLM custom", rank.microseconds(lambda i: vllm.all_reduce(data[i]), len(data), vllm.captured)
    if size <= _SYMMETRIC_BYTES:
        yield from symmetric_memory(rank, size)


class VllmCustom:
    """vLLM's custom all-reduce as FlashInfer ships it, out of place. A graph's inputs are registered after its capture,
    as vLLM does it."""

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
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, mine)
        handles, offsets = ([list(part) for part in parts] for parts in zip(*everybodys, strict=True))
        self._comm.vllm_register_graph_buffers(self._handle, handles, offsets)


def symmetric_memory(rank: Rank, size: int) -> Iterator[tuple[str, float]]:
    import torch.distributed._symmetric_memory as symm

    group = dist.group.WORLD
    assert group is not None
    count = _SYMMETRIC_SETS
    data = [symm.empty(size // 2, device=rank.device, dtype=torch.bfloat16).normal_() for _ in range(count)]
    for x in data:
        symm.rendezvous(x, group.group_name)
    ops = torch.ops.symm_mem
    yield "symm one-shot", rank.microseconds(lambda i: ops.one_shot_all_reduce(data[i], "sum", group.group_name), count)
    yield (
        "symm two-shot",
        rank.microseconds(lambda i: ops.two_shot_all_reduce_(data[i], "sum", group.group_name), count),
    )


def norms(rank: Rank, rows: int, hidden: int) -> Iterator[tuple[str, float]]:
    """All-reduce, residual add and RMSNorm of bfloat16 [rows, hidden]; the peers with our fused_add_rmsnorm."""
    vllm = VllmCustom.of(rank)
    data = [x.view(rows, hidden) for x in buffers(2 * rows * hidden, rank.device)]
    residual = [torch.randn_like(x) for x in data]
    weight = torch.randn(hidden, device=rank.device).to(torch.bfloat16)
    scale = torch.empty(rows, 1, device=rank.device)
    fp8 = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=rank.device)

    def split(reduce: Callable[[torch.Tensor], torch.Tensor | None], i: int) -> None:
        reduced = reduce(data[i])
        rk.fused_add_rmsnorm(data[i] if reduced is None else reduced, residual[i], weight, 1e-6)

    fused, count = rank.gpu.all_reduce_add_rmsnorm, len(data)
    yield "radix", rank.microseconds(lambda i: fused(data[i], residual[i], weight), count)
    yield "radix, to FP8", rank.microseconds(lambda i: fused(data[i], residual[i], weight, out=fp8, scale=scale), count)
    yield "radix, two ops", rank.microseconds(lambda i: split(rank.gpu.all_reduce, i), count)
    yield "NCCL + norm", rank.microseconds(lambda i: split(dist.all_reduce, i), count)
    if vllm is not None:
        yield "vLLM custom + norm", rank.microseconds(lambda i: split(vllm.all_reduce, i), count, vllm.captured)


def sweep(rank: Rank, size: int) -> Iterator[tuple[str, float]]:
    data = buffers(size, rank.device)
    for algorithm in ("one_shot", "two_shot"):
        for threads in (128, 256, 512):
            for blocks in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128):
                if (blocks > 1 and blocks * threads * 16 > 2 * size) or blocks * threads * 16 * 64 < size:
                    continue

                def call(i: int, algorithm: str = algorithm, blocks: int = blocks, threads: int = threads) -> None:
                    rank.gpu.all_reduce(data[i], algorithm=algorithm, blocks=blocks, threads=threads)

                yield f"{algorithm} {blocks}x{threads}", rank.microseconds(call, len(data))


def measure(number: int, world: int, folder: str, args: argparse.Namespace) -> None:
    if args.peers:
        peers.enable()
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=number, world_size=world, device_id=device
    )
    shm = ShmCommunicator(f"{folder}/group", number, world, max_bytes=1 << 16)
    rank = Rank(shm, GpuCommunicator(shm, device.index), device)
    rows: list[dict[str, Any]] = []

    def record(shape: str, contenders: Iterator[tuple[str, float]]) -> None:
        times = {name: round(us, 2) for name, us in contenders}
        rows.append({"ranks": world, "shape": shape, "microseconds": times})
        if number == 0:
            best = min((us, name) for name, us in times.items() if us == us)
            print(f"TP{world} {shape:24s}", "  ".join(f"{n} {us:.1f}" for n, us in times.items()), flush=True)
            if args.sweep:
                print(f"TP{world} {shape:24s} best: {best[1]} {best[0]:.2f}", flush=True)

    for size in args.sizes:
        record(f"{size >> 10} KiB", (sweep if args.sweep else sums)(rank, size))
    for shape in () if args.sweep or args.no_norms else NORMS:
        record("{} x {} + norm".format(*shape), norms(rank, *shape))
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
        ranks = [context.Process(target=measure, args=(number, world, folder, args)) for number in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"TP{world}: exit codes {[process.exitcode for process in ranks]}")
        rows: list[dict[str, Any]] = json.loads(Path(f"{folder}/rows.json").read_text())
        return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels all_reduce", description=__doc__)
    parser.add_argument("--backend", default="cuda", choices=("cuda",))
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="group sizes; default: all that fit")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--peers", action="store_true", help="compare with FlashInfer's vLLM all-reduce too")
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
        report = {"date": str(date.today()), "machine": torch.cuda.get_device_name(), "rows": rows}
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(parse())
