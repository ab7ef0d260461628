"""`python -m bench.serving one_call`: what a decode step on the CPU saves by running all layers in
one call of the wheel instead of layer by layer.

Both kinds of steps take turns, one by one, so that they meet the same state of the machine; ratios
are of neighbours. Random weights, contexts from 128 on. The tokens are the same: the two have the
same bits.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from .cpu import MODEL, PEERS
from .greedy import measure_turns


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serving one_call", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with a config.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weights", default="bf16", choices=list(PEERS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="of a batch")
    parser.add_argument("--steps", type=int, default=96, help="of each kind and batch")
    args = parser.parse_args(argv)

    from .radix import Model

    model = Model(folder=args.model, weights=args.weights, threads=args.threads)
    decoder = model.runner.model.model
    fused = decoder._cpu_decoder
    if not fused.applies_to(model.runner.kv_pool):
        raise SystemExit("the layers of this model do not run in one call")

    def switch(in_one_call: bool) -> None:
        fused._pool = model.runner.kv_pool
        fused._decoder = held if in_one_call else None

    held = fused._decoder
    measure_turns(model, args, switch, _line)


def _line(rows: int, layers: list[float], one: list[float]) -> str:
    """Pairs of neighbours; the last may have none."""
    ratio = statistics.median(a / b for a, b in zip(layers, one, strict=False))
    usual = f"{statistics.median(layers) * 1e3:.2f} ms, in one call"
    return (
        f"  {rows:2d} rows: layer by layer {usual} {statistics.median(one) * 1e3:.2f} ms, "
        f"ratio {ratio:.2f}, {len(one)} pairs"
    )
