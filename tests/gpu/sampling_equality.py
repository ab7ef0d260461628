"""The same draws on two devices and in Triton: 10,000 rows with mixed filters.

    python -m tests.gpu.sampling_equality write FILE --device cpu
    python -m tests.gpu.sampling_equality compare FILE --device cuda

Two runs, since a wheel serves one kind of device; where Triton is installed a GPU draws with it
too. A draw may differ only where the definition itself is a near tie: two scores within 1e-4, or an
id within 1e-4 of a filter's border.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

import numpy as np
import torch

import radix_kernels as rk
from tests.kernel.on_device import no_library_for

ROWS = 10_000
VOCAB = 4_099
SEED = 20_26
TIE = 1e-4


def problem() -> dict[str, torch.Tensor]:
    """The inputs of `top_k_top_p_sampling`, the same on every machine."""
    rng = np.random.default_rng(SEED)

    def pick(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(rng.choice(values, ROWS)).to(dtype)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(low, high, ROWS))

    scale = rng.choice([0.5, 2.0, 6.0], (ROWS, 1))
    logits = (rng.standard_normal((ROWS, VOCAB)) * scale).astype(np.float32)
    return {
        "logits": torch.from_numpy(logits),
        "temperature": pick([0.0, 0.3, 0.8, 1.0, 1.7], torch.float32),
        "top_k": pick([-1, 0, 1, 5, 50, 1000], torch.int32),
        "top_p": pick([1.0, 1.0, 0.95, 0.8, 0.3], torch.float32),
        "min_p": pick([0.0, 0.0, 0.05, 0.2], torch.float32),
        "seed": integers(-(2**62), 2**62),
        "position": integers(0, 2**30),
    }


def draw(data: dict[str, torch.Tensor], device: str) -> torch.Tensor:
    """Ids by the native kernels of the device."""
    there = {name: x.to(device) for name, x in data.items()}
    ids = rk.top_k_top_p_sampling(*there.values())
    top, _, top_ids = rk.token_logprobs(there["logits"], ids, 3)
    assert torch.isfinite(top).all() and int(top_ids.min()) >= 0
    return ids.cpu()


def draw_in_triton(data: dict[str, torch.Tensor], device: str) -> torch.Tensor:
    """Ids by the Triton kernel."""
    from radix_kernels.triton import top_k_top_p_sampling

    there: dict[str, Any] = {name: x.to(device) for name, x in data.items()}
    out = torch.empty(ROWS, dtype=torch.int32, device=device)
    top_k_top_p_sampling(**there, stream=0, out=out)
    return out.cpu()


def is_near_tie(data: dict[str, torch.Tensor], row: int) -> bool:
    """Whether float32 rounding may decide this row."""
    one = {name: x[row] for name, x in data.items()}
    x = (one["logits"] / one["temperature"]).double()
    order = torch.sort(x, descending=True, stable=True)
    count = int(one["top_k"]) if 0 < one["top_k"] < VOCAB else VOCAB
    mass = torch.softmax(order.values[:count], 0)
    before = mass.cumsum(0) - mass
    kept = torch.ones(count, dtype=torch.bool)
    top_p = float(one["top_p"])
    min_p = float(one["min_p"])
    if top_p < 1:
        if ((before - top_p).abs() < TIE).any():
            return True
        kept &= before < top_p
    if min_p > 0:
        ratio = mass / mass[0]
        if ((ratio / min_p - 1).abs() < TIE).any():
            return True
        kept &= ratio >= min_p
    u = rk.reference.uniform(one["seed"][None], one["position"][None], VOCAB)[0].double()
    scores = (x - torch.log(-torch.log1p(-u)))[order.indices[:count][kept]]
    best = scores.topk(min(2, len(scores))).values
    return len(best) == 2 and float(best[0] - best[1]) < TIE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("file")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    why = no_library_for(args.device)
    if why:
        sys.exit(f"no native draws on {args.device}: {why}")
    data = problem()
    ids = draw(data, args.device)
    if args.action == "write":
        np.save(args.file, ids.numpy())
        return
    expected = torch.from_numpy(np.load(args.file))
    wrong = tell("native", data, ids, expected)
    if args.device != "cpu" and importlib.util.find_spec("triton") is not None:
        wrong += tell("Triton", data, draw_in_triton(data, args.device), expected)
    sys.exit(bool(wrong))


def tell(
    name: str, data: dict[str, torch.Tensor], ids: torch.Tensor, expected: torch.Tensor
) -> int:
    """Prints how many draws are equal; returns how many differ for no reason."""
    parted = torch.nonzero(ids != expected).flatten().tolist()
    wrong = sum(1 for row in parted if not is_near_tie(data, row))
    print(f"{name}: {ROWS - len(parted)} of {ROWS} draws equal, {wrong} differ without a near tie")
    return wrong


if __name__ == "__main__":
    main()
