"""`python -m bench.kernels.kv_layout [--backend cpu|cuda] [--gib N] [--json F]`: what the order of
a KV pool costs its kernels.

One allocation is seen in two ways: layer first, a tensor of pages for each layer, and page first, a
tensor [pages, layers, ...] of which a layer has a view, so that a page is one piece of memory. The
pages of a row are scattered over the whole pool. Each figure is the time of a call over all layers
in turn; the two orders alternate within the run, and a ratio above 1 says that page first is
faster.

Decode, prefill and the two ops that store, at pages of several sizes; with `--latent` MLA's too.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import radix_kernels as rk

from .gpu_timing import in_turns
from .harness import ROUNDS, Timing, loops_in_turns, randn

FIRST = ("layer first", "page first")
HEADS = 32
KV_HEADS = 8
DIM = 128
LATENT_HEADS = 16  # 128 heads on 8 GPUs
LATENT_DIM = 512
ROPE_DIM = 64


@dataclass(frozen=True)
class Work:
    """`rows` requests with `new` tokens each, which see `context` tokens."""

    rows: int
    new: int
    context: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.new} tokens of {self.context}"


DECODE = (
    Work(rows=64, new=1, context=640),
    Work(rows=256, new=1, context=640),
    Work(rows=64, new=1, context=4096),
    Work(rows=256, new=1, context=4096),
)
PREFILL = (
    Work(rows=8, new=1024, context=1024),
    Work(rows=1, new=2048, context=8192),
)
STORE = (
    Work(rows=64, new=1, context=640),
    Work(rows=256, new=1, context=640),
    Work(rows=8, new=1024, context=1024),
)
CPU_DECODE = (
    Work(rows=1, new=1, context=4096),
    Work(rows=16, new=1, context=1024),
    Work(rows=64, new=1, context=640),
)
CPU_PREFILL = (Work(rows=1, new=256, context=1024),)
CPU_STORE = (
    Work(rows=64, new=1, context=640),
    Work(rows=1, new=256, context=256),
)


class Pool:
    """One allocation of `layers` layers, each with pages of `parts` arrays [page_size, *shape]."""

    def __init__(self, memory: torch.Tensor, *, layers: int, parts: int, shape: tuple[int, ...]):
        self._memory = memory
        self._layers = layers
        self._parts = parts
        self._shape = shape

    def num_pages(self, page_size: int) -> int:
        per_token = self._layers * self._parts * torch.Size(self._shape).numel()
        return self._memory.numel() // (per_token * page_size)

    def views(self, order: str, page_size: int) -> list[tuple[torch.Tensor, ...]]:
        """Of each layer its parts, [pages, page_size, *shape]."""
        pages = self.num_pages(page_size)
        page = (page_size, *self._shape)
        used = self._memory[: pages * self._layers * self._parts * torch.Size(page).numel()]
        if order == "layer first":
            whole = used.view(self._layers, self._parts, pages, *page)
            return [tuple(layer) for layer in whole]
        whole = used.view(pages, self._layers, self._parts, *page)
        return [
            tuple(whole[:, layer, part] for part in range(self._parts))
            for layer in range(self._layers)
        ]


@dataclass(frozen=True)
class Rows:
    """Where the tokens of a batch lie."""

    table: torch.Tensor  # [rows, pages] int32
    kv_lens: torch.Tensor  # [rows] int32
    cu_seqlens_q: torch.Tensor  # [rows + 1] int32
    positions: torch.Tensor  # [rows * new] int64
    slots: torch.Tensor  # [rows * new] int64


def scattered(work: Work, page_size: int, num_pages: int, device: torch.device) -> Rows:
    """Pages in random order from the whole pool, none twice."""
    per_row = -(-work.context // page_size)
    if work.rows * per_row > num_pages:
        raise SystemExit(f"{work} at pages of {page_size} do not fit: give a larger --gib")
    pages = torch.randperm(num_pages)[: work.rows * per_row].view(work.rows, per_row)
    position = torch.arange(work.context - work.new, work.context)
    slots = pages[:, position // page_size] * page_size + position % page_size
    starts = torch.arange(0, (work.rows + 1) * work.new, work.new, dtype=torch.int32)
    return Rows(
        table=pages.to(torch.int32).to(device),
        kv_lens=torch.full((work.rows,), work.context, dtype=torch.int32, device=device),
        cu_seqlens_q=starts.to(device),
        positions=position.repeat(work.rows).to(device),
        slots=slots.flatten().to(device),
    )


# A call on the parts of one layer.
Call = Callable[..., object]


def attention(work: Work, rows: Rows, like: torch.Tensor) -> Call:
    q = randn(work.rows * work.new, HEADS, DIM, device=like.device, dtype=like.dtype)
    at = (rows.table, rows.kv_lens, rows.cu_seqlens_q)
    return lambda k, v: rk.flash_attn_with_kvcache(q, k, v, *at, max_seqlen_q=work.new)


def store(work: Work, rows: Rows, like: torch.Tensor) -> Call:
    shape = (work.rows * work.new, KV_HEADS, DIM)
    k, v = (randn(*shape, device=like.device, dtype=like.dtype) for _ in range(2))
    return lambda k_cache, v_cache: rk.store_kv_cache(k, v, k_cache, v_cache, rows.slots)


def fused_store(work: Work, rows: Rows, like: torch.Tensor) -> Call:
    options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
    tokens = work.rows * work.new
    q = randn(tokens, HEADS, DIM, **options)
    k, v = (randn(tokens, KV_HEADS, DIM, **options) for _ in range(2))
    weight = torch.ones(DIM, **options)
    table = torch.rand(work.context, DIM, device=like.device)

    def call(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        rk.fused_qk_norm_rope_store(
            q, k, v, weight, weight, table, rows.positions, k_cache, v_cache, rows.slots
        )

    return call


def mla_decode(work: Work, rows: Rows, like: torch.Tensor) -> Call:
    sizes = (LATENT_DIM, ROPE_DIM)
    shape = (work.rows * work.new, LATENT_HEADS)
    nope, rope = (randn(*shape, n, device=like.device, dtype=like.dtype) for n in sizes)
    at = (rows.table, rows.kv_lens, rows.cu_seqlens_q)
    options: dict[str, Any] = {"softmax_scale": 192**-0.5, "max_seqlen_q": work.new}
    return lambda cache: rk.mla_decode(nope, rope, cache, *at, **options)


def gather_latents(work: Work, rows: Rows, like: torch.Tensor) -> Call:
    tokens = work.rows * work.context
    out = torch.empty(tokens, LATENT_DIM + ROPE_DIM, device=like.device, dtype=like.dtype)
    ends = torch.arange(0, tokens + 1, work.context, dtype=torch.int32, device=like.device)
    return lambda cache: rk.gather_mla_kv(cache, rows.table, ends, out)


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    op: str
    work: str
    page_size: int
    timings: dict[str, Timing]

    @property
    def ratio(self) -> float:
        """Time of layer first over that of page first."""
        layer_first, page_first = (self.timings[order].median_us for order in FIRST)
        return layer_first / page_first


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Work, Callable[..., Call]]]:
    """Name, work and maker of the calls of a pool."""
    gpu = args.backend == "cuda"
    if args.latent:
        yield from (("mla_decode", work, mla_decode) for work in DECODE)
        yield ("gather_mla_kv", PREFILL[1], gather_latents)
        return
    decode, prefill = (DECODE, PREFILL) if gpu else (CPU_DECODE, CPU_PREFILL)
    yield from (("decode", work, attention) for work in decode)
    yield from (("prefill", work, attention) for work in prefill)
    for work in STORE if gpu else CPU_STORE:
        yield "store_kv_cache", work, store
        yield "fused_qk_norm_rope_store", work, fused_store


def measure(args: argparse.Namespace, pool: Pool, page_size: int) -> Iterator[Line]:
    """A line for each case at pages of one size."""
    device = torch.device(args.backend)
    views = {order: pool.views(order, page_size) for order in FIRST}
    for op, work, make in cases(args):
        if args.only and not any(text in f"{op} {work}" for text in args.only):
            continue
        rows = scattered(work, page_size, pool.num_pages(page_size), device)
        call = make(work, rows, views["page first"][0][0])
        turns = in_turns if device.type == "cuda" else loops_in_turns
        timings = turns(dict.fromkeys(FIRST, call), views, rounds=args.rounds, seconds=args.seconds)
        yield Line(op=op, work=str(work), page_size=page_size, timings=timings)


def memory_of(args: argparse.Namespace) -> torch.Tensor:
    """The pool's memory, of normal numbers."""
    device = torch.device(args.backend)
    memory = torch.empty(int(args.gib * 2**30) // 2, dtype=torch.bfloat16, device=device)
    for part in memory.split(1 << 28):
        if device.type == "cuda":
            part.normal_()
        else:
            part.copy_(randn(part.numel(), device=device, dtype=part.dtype))
    return memory


def text_of(line: Line) -> str:
    """A line of the printed table."""
    times = "".join(f"{line.timings[order].median_us:12.1f}" for order in FIRST)
    spread = max((t.high_us - t.low_us) / t.median_us for t in line.timings.values())
    return f"{line.op:26s}{line.work:28s}{line.page_size:5d}{times}{line.ratio:8.3f}{spread:8.1%}"


def report_of(args: argparse.Namespace, lines: list[Line]) -> dict[str, object]:
    """What is written as JSON."""
    gpu = args.backend == "cuda"
    return {
        "date": str(datetime.date.today()),
        "machine": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
        "radix_kernels": rk.__version__,
        "gib": args.gib,
        "layers": args.layers,
        "latent": args.latent,
        "rows": [
            {
                "op": line.op,
                "work": line.work,
                "page_size": line.page_size,
                "ratio": line.ratio,
                "microseconds": {order: vars(t) for order, t in line.timings.items()},
            }
            for line in lines
        ],
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.kv_layout", description=__doc__)
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--gib", type=float, default=None, help="of the pool (cpu 2, cuda 100)")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--latent", action="store_true", help="a pool of latents, and MLA's ops")
    parser.add_argument("--only", nargs="+", help="cases that contain one of these texts")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=0.06, help="of an arm's round, at least")
    parser.add_argument("--json", help="write all figures to this file, after each line")
    args = parser.parse_args(arguments)
    if args.gib is None:
        args.gib = 100.0 if args.backend == "cuda" else 2.0
    if args.backend == "cpu":
        rk.set_num_threads(torch.get_num_threads())
    return args


def main(arguments: list[str] | None = None) -> list[Line]:
    """Measures, prints and writes; the lines."""
    args = parse(arguments)
    if args.latent:
        pool = Pool(memory_of(args), layers=args.layers, parts=1, shape=(LATENT_DIM + ROPE_DIM,))
    else:
        pool = Pool(memory_of(args), layers=args.layers, parts=2, shape=(KV_HEADS, DIM))
    print(f"{args.gib:g} GiB, {args.layers} layers; microseconds a call, by the pool's order")
    print(f"{'':54s}{'page':>5s}{FIRST[0]:>12s}{FIRST[1]:>12s}{'ratio':>8s}{'spread':>8s}")
    lines: list[Line] = []
    for page_size in args.page_sizes:
        for line in measure(args, pool, page_size):
            lines.append(line)
            print(text_of(line), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(report_of(args, lines), indent=1))
    return lines


if __name__ == "__main__":
    main()
