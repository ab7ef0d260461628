"""`python -m bench.kernels FAMILY... [--backend cpu|cuda] [--dtype D] [--ops TEXT...]
[--shapes TEXT...] [--peers] [--json F]`.

Prints for each op and shape: our median and its range, GB/s, TFLOP/s, the share of the measured
machine limit that bounds the op, and how many times faster than each peer we are; "in cache" where
a CPU's cache holds all inputs. On a GPU also how it was timed, what an empty kernel and a plain
read of the same bytes take beside short rows, and clock and power of long ones.

On the CPU torch is the peer of every op that it has, and needs no flag; what `--peers` adds runs on
a GPU alone. A contender that takes long on the CPU has fewer rounds, which its row says.

`all_reduce` starts a process for each GPU and has options of its own: `python -m bench.kernels
all_reduce --help`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch

import radix_kernels as rk

from . import all_reduce, peers
from .families import FAMILIES
from .harness import MIN_ROUNDS, NOT_SLOWER, ROUNDS, SLOW_SECONDS, Case, Row, measure
from .limits import Limits, measure_limits


def main() -> None:
    if sys.argv[1:2] == ["all_reduce"]:
        return all_reduce.main(all_reduce.parse(sys.argv[2:]))
    args = _parse()
    device = torch.device(args.backend)
    dtype = getattr(torch, args.dtype)
    limits = measure_limits(device)
    print(_heading(limits))
    names = list(FAMILIES) if "all" in args.family else args.family
    rows = []
    for name in names:
        for case in FAMILIES[name](device, dtype):
            if not (_is_asked(case.op, args.ops) and _is_asked(case.shape, args.shapes)):
                continue
            memory, arithmetic = _least_seconds(case, limits)
            seconds = {"arm_seconds": args.arm_seconds, "slow_seconds": args.slow_seconds}
            rows.append(measure(case, device, compute_bound=arithmetic > memory, **seconds))
            print(_line(rows[-1], limits), flush=True)
            if args.json:  # after each row: a run that is cut short keeps what it has
                Path(args.json).write_text(json.dumps(_report(rows, limits), indent=1))
    if not rows:
        sys.exit(_nothing(args))


def _is_asked(name: str, texts: list[str] | None) -> bool:
    return not texts or any(text in name for text in texts)


def _nothing(args: argparse.Namespace) -> str:
    """Why no case was left."""
    asked = {"op": args.ops, "shape": args.shapes}
    said = [f"no {what} contains {' or '.join(texts)}" for what, texts in asked.items() if texts]
    return "no case: " + (", or ".join(said) or "the family has none on this backend")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("family", nargs="+", choices=[*FAMILIES, "all"])
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ops", nargs="+", help="only ops whose name contains one of these texts")
    parser.add_argument("--shapes", nargs="+", help="only shapes that contain one of these texts")
    parser.add_argument("--threads", type=int, help="CPU threads, for us and the peers")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="GPU: compare with flashinfer and others too, where installed",
    )
    parser.add_argument(
        "--arm-seconds", type=float, default=1.0, help="GPU: least time of an arm of a long row"
    )
    parser.add_argument(
        "--slow-seconds",
        type=float,
        default=SLOW_SECONDS,
        help="CPU: a contender that has taken this long in a row stops after "
        f"{MIN_ROUNDS} of {ROUNDS} rounds (%(default)s)",
    )
    parser.add_argument("--json", help="write all figures to this file, after each row")
    args = parser.parse_args()
    if args.peers and args.backend == "cpu":
        print("--peers adds none on the CPU: torch is the peer there, and in every run")
    elif args.peers:
        peers.enable()
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
        f"measured limits: read {limits.read_gbs:.1f}, copy {limits.copy_gbs:.1f} GB/s; "
        f"torch.mm {peaks}\n"
        f"{'op':36s}{'shape':34s}{'us':>10s}{'range':>20s}{'GB/s':>9s}{'TFLOP/s':>9s}{'limit':>7s}"
        "  times faster than"
    )


def _least_seconds(case: Case, limits: Limits) -> tuple[float, float]:
    return limits.seconds(case.bytes, case.flops, case.dtype, case.limit)


def _share(row: Row, limits: Limits) -> float:
    """Least time the machine needs over the time taken; above 1 where we beat the library's."""
    return max(_least_seconds(row.case, limits)) / (row.timings["radix"].median_us / 1e6)


def _line(row: Row, limits: Limits) -> str:
    case = row.case
    ours = row.timings["radix"]
    ratios = "  ".join(f"{p} {row.ratio(p):.2f}x" for p in row.timings if p != "radix")
    spread = f"{ours.low_us:.1f}..{ours.high_us:.1f}"
    return (
        f"{case.op:36s}{case.shape:34s}{ours.median_us:10.1f}{spread:>20s}"
        f"{case.bytes / ours.median_us / 1e3:9.1f}{case.flops / ours.median_us / 1e6:9.3f}"
        f"{_share(row, limits):7.0%}  {ratios}{_facts(row)}"
    )


def _facts(row: Row) -> str:
    """How a row was timed, and what stands beside it."""
    ours = row.timings["radix"]
    notes = [] if ours.method == "loop" else [ours.method]
    if row.in_cache:
        notes.append("in cache")
    notes += [f"{name} {us:.1f} us" for name, us in row.floor.items()]
    for name, t in row.timings.items():
        if ours.method == "loop" and t.rounds < ROUNDS:
            notes.append(f"{name} {t.rounds} rounds")
        if t.sm_mhz is not None and t.watts is not None:
            notes.append(f"{name} {t.sm_mhz:.0f} MHz {t.watts:.0f} W")
        if t.method != ours.method:
            notes.append(f"{name} timed by {t.method}")
    return f"  [{', '.join(notes)}]" if notes else ""


def _report(rows: list[Row], limits: Limits) -> dict[str, object]:
    return {
        "date": str(datetime.date.today()),
        "machine": limits.device,
        "torch": torch.__version__,
        "radix_kernels": rk.__version__,
        "read_gbs": limits.read_gbs,
        "copy_gbs": limits.copy_gbs,
        "tflops": {str(d): r for d, r in limits.tflops.items()},
        "rows": [_row_report(row, limits) for row in rows],
    }


def _row_report(row: Row, limits: Limits) -> dict[str, object]:
    case = row.case
    ratios = {peer: row.ratio(peer) for peer in row.timings if peer != "radix"}
    return {
        "op": case.op,
        "shape": case.shape,
        "dtype": str(case.dtype),
        "bytes": case.bytes,
        "flops": case.flops,
        "share_of_limit": _share(row, limits),
        "limit": case.limit,
        "floor_us": row.floor,
        "in_cache": row.in_cache,
        "times_faster_than": ratios,
        "not_slower": all(ratio >= NOT_SLOWER for ratio in ratios.values()),
        "microseconds": {name: vars(timing) for name, timing in row.timings.items()},
    }


if __name__ == "__main__":
    main()
