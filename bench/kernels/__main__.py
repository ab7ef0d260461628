"""`python -m bench.kernels FAMILY... [--backend cpu|cuda] [--dtype D] [--shapes TEXT] [--json F]`.

Prints for each op and shape: our median and its range, GB/s, TFLOP/s, the share of the measured
machine limit that bounds the op, and how many times faster than each peer we are.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import torch

import radix_kernels as rk

from .families import FAMILIES
from .harness import Row, measure
from .limits import Limits, measure_limits


def main() -> None:
    args = _parse()
    device = torch.device(args.backend)
    dtype = getattr(torch, args.dtype)
    limits = measure_limits(device)
    print(_heading(limits))
    names = list(FAMILIES) if "all" in args.family else args.family
    rows = []
    for name in names:
        for case in FAMILIES[name](device, dtype):
            if args.shapes and args.shapes not in case.shape:
                continue
            rows.append(measure(case, device))
            print(_line(rows[-1], limits), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(_report(rows, limits), indent=1))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("family", nargs="+", choices=[*FAMILIES, "all"])
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shapes", help="only shapes that contain this text")
    parser.add_argument("--threads", type=int, help="CPU threads, for us and the peers")
    parser.add_argument("--json", help="write all figures to this file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rk.set_num_threads(torch.get_num_threads())
    return args


def _heading(limits: Limits) -> str:
    caps = rk.capabilities()
    peaks = ", ".join(f"{str(d)[6:]} {r:.2f} TFLOP/s" for d, r in limits.tflops.items())
    return (
        f"{datetime.date.today()}  {limits.device}  radix-kernels {rk.__version__} "
        f"({caps['backend']}, {caps['isa']})  torch {torch.__version__}\n"
        f"measured limits: {limits.read_gbs:.1f} GB/s; torch.mm {peaks}\n"
        f"{'op':26s}{'shape':34s}{'us':>10s}{'range':>20s}{'GB/s':>9s}{'TFLOP/s':>9s}{'limit':>7s}"
        "  times faster than"
    )


def _share(row: Row, limits: Limits) -> float:
    """Least time the machine needs over the time taken; above 1 where we beat the library's."""
    seconds = row.timings["radix"].median_us / 1e6
    peak = limits.tflops.get(row.case.dtype, limits.tflops[torch.float32])
    return max(row.case.bytes / limits.read_gbs / 1e9, row.case.flops / peak / 1e12) / seconds


def _line(row: Row, limits: Limits) -> str:
    case, ours = row.case, row.timings["radix"]
    peers = "  ".join(f"{p} {row.ratio(p):.2f}x" for p in row.timings if p != "radix")
    spread = f"{ours.low_us:.1f}..{ours.high_us:.1f}"
    return (
        f"{case.op:26s}{case.shape:34s}{ours.median_us:10.1f}{spread:>20s}"
        f"{case.bytes / ours.median_us / 1e3:9.1f}{case.flops / ours.median_us / 1e6:9.3f}"
        f"{_share(row, limits):7.0%}  {peers}"
    )


def _report(rows: list[Row], limits: Limits) -> dict[str, object]:
    return {
        "date": str(datetime.date.today()),
        "machine": limits.device,
        "torch": torch.__version__,
        "radix_kernels": rk.__version__,
        "read_gbs": limits.read_gbs,
        "tflops": {str(d): r for d, r in limits.tflops.items()},
        "rows": [
            {
                "op": r.case.op,
                "shape": r.case.shape,
                "dtype": str(r.case.dtype),
                "share_of_limit": _share(r, limits),
                "microseconds": {n: vars(t) for n, t in r.timings.items()},
            }
            for r in rows
        ],
    }


if __name__ == "__main__":
    main()
