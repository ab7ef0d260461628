"""`python -m bench.serving one_call`: what a decode step on the CPU saves, and a prompt, by running
all layers in one call of the wheel instead of layer by layer.

Both kinds of steps take turns, one by one, so that they meet the same state of the machine; ratios
are of neighbours. Random weights, contexts from 128 on; a prompt is a new one up to its first
token. The tokens are the same: the two have the same bits.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cpu import MODEL, PEERS
from .greedy import measure_turns


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serving one_call", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with a config.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weights", default="bf16", choices=list(PEERS))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8], help="of a batch")
    parser.add_argument("--steps", type=int, default=96, help="of each kind and batch")
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="their tokens")
    parser.add_argument("--pairs", type=int, default=8, help="of prompts of each length")
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
    for tokens in args.prompts:
        layers, one = _prompts(model, tokens, args.pairs, switch)
        print(_prompt_line(tokens, layers, one), flush=True)


def _prompts(
    model: Any, tokens: int, pairs: int, switch: Callable[[bool], None]
) -> tuple[list[float], list[float]]:
    """Seconds of prompts layer by layer and in one call, in turns; the first pair does not
    count."""
    layers = []
    one = []
    for _ in range(pairs + 1):
        switch(False)
        layers.append(model.prefill(tokens))
        switch(True)
        one.append(model.prefill(tokens))
    return layers[1:], one[1:]


def _prompt_line(tokens: int, layers: list[float], one: list[float]) -> str:
    ratio = statistics.median(a / b for a, b in zip(layers, one, strict=True))
    rates = [tokens / statistics.median(times) for times in (layers, one)]
    return (
        f"  a prompt of {tokens} tokens: layer by layer {rates[0]:.0f} tokens/s, in one call "
        f"{rates[1]:.0f}, ratio {ratio:.2f}, {len(one)} pairs"
    )


def _line(rows: int, layers: list[float], one: list[float]) -> str:
    """Pairs of neighbours; the last may have none."""
    ratio = statistics.median(a / b for a, b in zip(layers, one, strict=False))
    usual = f"{statistics.median(layers) * 1e3:.2f} ms, in one call"
    return (
        f"  {rows:2d} rows: layer by layer {usual} {statistics.median(one) * 1e3:.2f} ms, "
        f"ratio {ratio:.2f}, {len(one)} pairs"
    )
