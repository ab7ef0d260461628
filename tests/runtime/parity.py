"""What the parity tests share: transformers' greedy answers for the tiny checkpoints."""

from __future__ import annotations

import functools
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radix_runtime import Engine, SamplingParams
from tests.runtime.tiny_models import TINY, reference_model, save

NEW_TOKENS = 32
GAP = 1e-3  # smallest distance of the two best logits at which float32 runs must agree
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)


@dataclass
class Case:
    """A checkpoint, prompts, transformers' greedy continuations, and the smallest gap in them."""

    folder: Path
    model: Any
    prompts: list[list[int]]
    answers: list[list[int]]
    gap: float
    home: tempfile.TemporaryDirectory[str]  # removes `folder` when the process ends


def prompts_for(vocab_size: int, seed: int) -> list[list[int]]:
    """Lengths of one, odd, a page and more; three share 64 tokens."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return rng.choices(range(vocab_size), k=count)

    shared = ids(64)
    free = [ids(n) for n in (1, 17, 40, 64)]
    return [*free, shared + ids(9), shared + ids(25), [*shared, 7, 8, 9]]


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int = NEW_TOKENS) -> tuple[list[int], float]:
    """transformers' generate: the new tokens and the smallest gap between the two best logits."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


@functools.cache
def case(name: str) -> Case:
    """The first seed at which no step of transformers is a near tie."""
    for seed in range(50):
        model = reference_model(name, seed)
        prompts = prompts_for(model.config.vocab_size, seed)
        answers: list[list[int]] = []
        gap = 1.0
        for prompt in prompts:
            tokens, smallest = greedy(model, prompt)
            answers.append(tokens)
            gap = min(gap, smallest)
            if gap <= GAP:
                break
        else:
            home = tempfile.TemporaryDirectory(prefix=f"radix-{name}-")
            return Case(
                folder=save(model, Path(home.name)),
                model=model,
                prompts=prompts,
                answers=answers,
                gap=gap,
                home=home,
            )
    raise AssertionError(f"no seed of {name} keeps clear of ties")


def engine(folder: Path | str | None, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "dtype": "float32", "max_total_tokens": 2048, "num_threads": 1, "check_invariants": "step",
        "max_running_requests": 16,
    }  # fmt: skip
    return Engine(folder, **{**settings, **changes})


def ids_of(outputs: Any) -> list[list[int]]:
    return [output["output_ids"] for output in outputs]


__all__ = ["GAP", "GREEDY", "NEW_TOKENS", "TINY", "Case", "case", "engine", "greedy", "ids_of"]
