"""Steps replayed from CUDA graphs give the tokens of the same steps queued kernel by kernel.

    python -m tests.gpu.graph_tokens MODEL [--requests 200] [--toggles overlap page chunk]

MODEL is a folder with a config.json; weights are random, in the config's dtype. Greedy and drawn,
with and without penalties and log-probabilities: ids and log-probabilities must be equal to the
bit.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from radix_runtime import Engine, SamplingParams

Answer = tuple[list[int], Any]

TOGGLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"disable_overlap_schedule": True},
    "page": {"page_size": 64},
    "page of one": {"page_size": 1},
    "chunk": {"chunked_prefill_size": 300},
    "small chunk": {"chunked_prefill_size": 65},
    "cache": {"disable_radix_cache": True},
    "sizes": {"cuda_graph_bs": [1, 3, 24, 64]},
    "few sizes": {"cuda_graph_max_bs": 9},  # steps of more rows are queued
    "odd rows": {"max_running_requests": 63},  # the last size is no multiple of eight
    "few tokens": {"cuda_graph_max_tokens": 96},
    "together": {
        "disable_overlap_schedule": True,
        "disable_radix_cache": True,
        "page_size": 64,
        "chunked_prefill_size": 300,
        "cuda_graph_bs": [1, 3, 24, 64],
    },
}


def requests(count: int, vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 700 tokens, some of which begin alike."""
    rng = random.Random(5)
    shared = rng.choices(range(vocab), k=200)
    prompts = []
    params = []
    for seed in range(count):
        own = rng.choices(range(vocab), k=rng.choice([1, 5, 40, 130, 500]))
        prompts.append(shared[: rng.choice([0, 0, 64, 200])] + own)
        params.append(
            SamplingParams(
                temperature=rng.choice([0, 0.8]),
                top_p=rng.choice([1.0, 0.95]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
                max_new_tokens=rng.randint(1, 80),
                ignore_eos=True,
                seed=seed,
            )
        )
    return prompts, params


def answers(folder: Path, count: int, **settings: Any) -> list[Answer]:
    """Twice all requests: without log-probabilities, then with them."""
    options: dict[str, Any] = {
        "device": "cuda",
        "load_format": "dummy",
        "context_length": 2048,
        "max_running_requests": 64,
        "chunked_prefill_size": 1024,
        "mem_fraction_static": 0.4,
        "random_seed": 1,
    }
    found = []
    with Engine(folder, **{**options, **settings}) as engine:
        vocab = engine.executor.vocab_size
        prompts, params = requests(count, vocab)
        for logprobs in (False, True):
            outputs = engine.generate(
                input_ids=prompts, sampling_params=params, return_logprob=logprobs
            )
            found += [
                (output["output_ids"], output["meta_info"].get("output_token_logprobs"))
                for output in outputs
            ]
        print(f"{engine.executor.runner.num_graphs} graphs", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--toggles", nargs="+", choices=list(TOGGLES), default=list(TOGGLES))
    args = parser.parse_args()
    wrong = 0
    for name in args.toggles:
        settings = TOGGLES[name]
        eager = answers(args.model, args.requests, disable_cuda_graph=True, **settings)
        graphs = answers(args.model, args.requests, **settings)
        differing = sum(1 for a, b in zip(eager, graphs, strict=True) if a != b)
        print(f"{name}: {len(eager) - differing} of {len(eager)} answers equal", flush=True)
        wrong += differing
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
