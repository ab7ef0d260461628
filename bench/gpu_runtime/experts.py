"""`python -m bench.gpu_runtime.experts MODEL --arm ARM`: do rows spread over the experts?

Random weights may send every row to the same experts, and a step then reads only those: its time
is no other engine's, nor a trained model's. This decodes some rows with an engine as
`bench.gpu_runtime` loads it, and prints of each layer how many experts a step's rows chose between
them, and how many rows the most popular one had. An arm is loaded in this process, without what
would hide its choices (our CUDA graphs): nothing here is timed.

    python -m bench.gpu_runtime.experts dsv2-lite --arm radix
    python -m bench.gpu_runtime.experts dsv2-lite --arm vllm
    python -m bench.gpu_runtime.experts dsv2-lite --arm vllm:load_format=dummy
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from radix_runtime.layers.moe import SparseMoe

from .contender import Arm, EngineSizes, load
from .models import model_folder

_PROMPT = 100  # tokens
_LENGTH = 9  # tokens of each answer: one of its prompt's step, others of decode steps
_SETTINGS: dict[str, dict[str, Any]] = {
    "radix": {"disable_cuda_graph": True},
    "vllm": {"enable_return_routed_experts": True},
}


@dataclass(frozen=True)
class Spread:
    """How rows spread over a layer's experts, of which each row passes several. `used`: experts
    that a step's rows chose between them, the mean of the steps; `busiest`: rows of the most
    popular one in any step."""

    layer: int
    used: float
    busiest: int


def spreads(ids: np.ndarray) -> list[Spread]:
    """Of each layer that has experts; ids [steps, layers, rows, top_k]."""
    found = []
    for layer in range(ids.shape[1]):
        counts = [np.bincount(step.ravel()) for step in ids[:, layer]]
        busiest = max(int(count.max()) for count in counts)
        if busiest > ids.shape[2]:  # a row passes an expert once: here are none
            continue
        used = float(np.mean([np.count_nonzero(count) for count in counts]))
        found.append(Spread(layer=layer, used=used, busiest=busiest))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_runtime.experts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=model_folder, metavar="MODEL")
    parser.add_argument("--arm", type=Arm.parse, required=True, metavar="ENGINE[:FIELD=VALUE,...]")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.6, help="0: greedy")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of vLLM's engine")
    args = parser.parse_args()
    settings = {**_SETTINGS[args.arm.engine], **args.arm.settings}
    arm = Arm(name=args.arm.name, engine=args.arm.engine, settings=settings)
    sizes = EngineSizes(max_rows=args.rows, context=512, ranks=args.tp)
    SparseMoe.fusible = False  # kernels that run whole layers tell nobody what they chose
    model = load(arm, args.model, sizes)
    rng = random.Random(0)
    prompts = [[rng.randrange(model.vocabulary) for _ in range(_PROMPT)] for _ in range(args.rows)]
    found = spreads(model.chosen_experts(prompts, _LENGTH, args.temperature))
    print(f"{args.model.name}, {arm.name}: {model.version}")
    for spread in found:
        print(f"layer {spread.layer}: {spread.used:.1f} experts, at most {spread.busiest} rows")
    if not found:
        raise SystemExit("no layer has experts, or a kernel that chooses them itself tells nobody")
    least = min(spread.used for spread in found)
    print(f"{args.rows} rows: at least {least:.1f} experts a layer and step")


if __name__ == "__main__":
    main()
