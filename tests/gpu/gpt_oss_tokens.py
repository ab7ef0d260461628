"""A random gpt-oss on a GPU, with experts in MXFP4 and in floats: biases, clamped SwiGLU, sinks,
windows of 128.

    python -m tests.gpu.gpt_oss_tokens [--device cuda]

In float32, steps replayed from CUDA graphs, log-probabilities of prompts must be those of
transformers' float32 model of the same codes, and every greedy token one of its best. In bfloat16
they must be near float32's, and answers may part only where float32's two best log-probabilities
are close; the same with steps queued kernel by kernel. Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.gpu.quantized_tokens import answers, compare, run_or_tell
from tests.gpu.quantized_tokens import prompts as made_prompts
from tests.runtime import mxfp4_models

EXACT = 2e-3  # of log-probabilities: float32 sums in another order
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDTH = 384  # of an expert
EXPERTS = ("mxfp4", "floats")
# Weights of experts with which rounding does not grow from layer to layer.
EXPONENTS = range(118, 121)
SPREAD = 0.02


def against_transformers(model: torch.nn.Module, rows: list[dict[str, Any]]) -> tuple[str, bool]:
    """How far the log-probabilities of prompts are from the model's, and its best tokens from those
    that were drawn; whether all is well."""
    distance = 0.0
    behind = 0.0
    for prompt, row in zip(made_prompts(), rows, strict=True):
        ids = torch.tensor([prompt + row["tokens"]])
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0].log_softmax(-1)
        of_next = scores[:-1].gather(1, ids[0, 1:, None])[:, 0]
        found = torch.tensor(row["prompt"])
        if len(found):
            distance = max(distance, float((of_next[: len(found)] - found).abs().max()))
        first = len(prompt) - 1
        best = scores[first:-1].amax(-1)
        behind = max(behind, float((best - of_next[first:]).max()))
    text = (
        f"log-probabilities {distance:.1e} from transformers', drawn tokens {behind:.1e} behind "
        "its best"
    )
    return text, distance < EXACT and behind < EXACT


def check(device: str, sizes: Mapping[str, Any], width: int, experts: str) -> bool:
    """Prints a line for each run; whether all is well."""
    settings: dict[str, Any] = mxfp4_models.SETTINGS
    left_out: tuple[str, ...] = ()
    if experts == "floats":
        settings = {**settings, "modules_to_not_convert": ["model.layers.*.mlp", "lm_head"]}
        left_out = tuple(f"model.layers.{i}" for i in range(sizes["num_hidden_layers"]))
    with tempfile.TemporaryDirectory() as home:
        made = mxfp4_models.write(
            Path(home),
            width,
            settings,
            left_out=left_out,
            sizes=sizes,
            exponents=EXPONENTS,
            spread=SPREAD,
        )
        exact = answers(made.folder, device=device, dtype="float32")
        is_well = _tell(f"{experts}, float32", *against_transformers(made.reference, exact))
        runs: dict[str, dict[str, Any]] = {"bfloat16": {}}
        if device != "cpu":
            runs["bfloat16, queued"] = {"disable_cuda_graph": True}
        for name, flags in runs.items():
            found = answers(made.folder, device=device, dtype="bfloat16", **flags)
            is_well &= _tell(f"{experts}, {name}", *compare(exact, found))
    return is_well


def _tell(name: str, text: str, good: bool) -> bool:
    print(f"{'ok   ' if good else 'WRONG'} {name}: {text}", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    found = [
        run_or_tell(experts, partial(check, args.device, SIZES, WIDTH, experts))
        for experts in EXPERTS
    ]
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
