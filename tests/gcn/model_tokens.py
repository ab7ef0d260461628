"""The embedded demo model's tokens from AMD's machine code, executed on the CPU.

    python -m tests.gcn.model_tokens [--target gfx942] [--prompts 20]

A plain forward pass through public ops alone, in bfloat16: norms, rotary embedding with the KV
store, the gated activation and the draw are the ROCm library's kernels, attention is Triton's; both
run in the executor. Products of matrices, which torch leaves to the vendor's library, are torch's
CPU ones. The tokens must be those of `tests/runtime/data/demo_tokens.json`, of prompts whose
smallest recorded gap between the two best log-probabilities is above 0.1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear

CHUNK = 64  # tokens of a step at most
GAP = 0.1
PAGE = 16
PAGES_A_ROW = 4
NEW_TOKENS = 32
ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "runtime/radix_runtime/demo_model"
RECORDED = ROOT / "tests/runtime/data/demo_tokens.json"


@dataclass(frozen=True)
class Step:
    """A step's tokens: of each sequence so many that follow what its pages hold.

    ids, positions, slots: [T]; table: [B, pages]; lengths: [B], with the step's tokens; starts: [B
    + 1].
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor


class Model:
    """Qwen3's layers, by the checkpoint's names."""

    def __init__(self, rows: int) -> None:
        import radix_kernels as rk

        self.config: dict[str, Any] = json.loads((MODEL / "config.json").read_text())
        self.weights = load_file(MODEL / "model.safetensors")
        self.eps = self.config["rms_norm_eps"]
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.dim = self.config["head_dim"]
        self.layers = self.config["num_hidden_layers"]
        shape = (rows * PAGES_A_ROW, PAGE, self.kv_heads, self.dim)
        # What no token was stored in is NaN, as a test's poison.
        self.caches = [
            [torch.full(shape, float("nan"), dtype=torch.bfloat16) for _ in range(2)]
            for _ in range(self.layers)
        ]
        limit = PAGES_A_ROW * PAGE
        self.rotary = rk.reference.rope_cos_sin_cache(self.dim, limit, self.config["rope_theta"])
        self.rmsnorm = on_gpu(rk.rmsnorm)
        self.add_rmsnorm = on_gpu(rk.fused_add_rmsnorm)
        self.store = on_gpu(rk.fused_qk_norm_rope_store)
        self.activate = on_gpu(rk.silu_and_mul)
        self.draw = on_gpu(rk.top_k_top_p_sampling)
        self.attend = rk.flash_attn_with_kvcache

    def forward(self, step: Step) -> torch.Tensor:
        """The next token of each sequence, [B]."""
        residual = self.weights["model.embed_tokens.weight"][step.ids]
        x = self.rmsnorm(residual, self.weights["model.layers.0.input_layernorm.weight"], self.eps)
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            x = self._attention(f"{name}.self_attn", layer, x, step)
            norm = self.weights[f"{name}.post_attention_layernorm.weight"]
            self.add_rmsnorm(x, residual, norm, self.eps)
            x = self._feed_forward(f"{name}.mlp", x)
            following = f"model.layers.{layer + 1}.input_layernorm.weight"
            last = layer + 1 == self.layers
            norm = self.weights["model.norm.weight" if last else following]
            self.add_rmsnorm(x, residual, norm, self.eps)
        ends = x[step.starts[1:].long() - 1]
        return self._greedy(linear(ends, self.weights["model.embed_tokens.weight"]).float())

    def _attention(self, name: str, layer: int, x: torch.Tensor, step: Step) -> torch.Tensor:
        q, k, v = (
            linear(x, self.weights[f"{name}.{part}_proj.weight"]).unflatten(-1, (-1, self.dim))
            for part in "qkv"
        )
        norms = (self.weights[f"{name}.{part}_norm.weight"] for part in "qk")
        caches = self.caches[layer]
        self.store(q, k, v, *norms, self.rotary, step.positions, *caches, step.slots, eps=self.eps)
        out = torch.full_like(q, float("nan"))
        self.attend(
            q, *caches, step.table, step.lengths, step.starts, out=out, implementation="triton"
        )
        return linear(out.flatten(1), self.weights[f"{name}.o_proj.weight"])

    def _feed_forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        halves = [linear(x, self.weights[f"{name}.{part}_proj.weight"]) for part in ("gate", "up")]
        return linear(
            self.activate(torch.cat(halves, -1)), self.weights[f"{name}.down_proj.weight"]
        )

    def _greedy(self, logits: torch.Tensor) -> torch.Tensor:
        count = len(logits)
        zeros = torch.zeros(count)
        top_k = torch.zeros(count, dtype=torch.int32)
        ones = torch.ones(count)
        longs = torch.zeros(count, dtype=torch.int64)
        drawn: torch.Tensor = self.draw(logits, zeros, top_k, ones, zeros, longs, longs)
        return drawn


def on_gpu(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op on the executor: torch's tensors as arrays of its GPU for the time of the call."""
    from tests.gcn import arrays

    def there(x: Any) -> Any:
        return arrays.Array(x) if isinstance(x, torch.Tensor) else x

    def call(*args: Any, **options: Any) -> Any:
        try:
            result = op(*map(there, args), **options)
        finally:
            arrays.close_memory()
        return result.tensor if isinstance(result, arrays.Array) else result

    return call


def make_step(sequences: Sequence[tuple[int, int, list[int]]]) -> Step:
    """Of (row, tokens that its pages hold, new tokens)."""
    positions = [held + i for _, held, new in sequences for i in range(len(new))]
    rows = [row for row, _, new in sequences for _ in new]
    first = PAGES_A_ROW * PAGE
    lengths = [len(new) for _, _, new in sequences]
    ints = {"dtype": torch.int32}
    return Step(
        ids=torch.tensor([token for _, _, new in sequences for token in new]),
        positions=torch.tensor(positions),
        slots=torch.tensor([r * first + p for r, p in zip(rows, positions, strict=True)]),
        table=torch.stack(
            [torch.arange(PAGES_A_ROW, **ints) + row * PAGES_A_ROW for row, _, _ in sequences]
        ),
        lengths=torch.tensor([held + len(new) for _, held, new in sequences], **ints),
        starts=torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], **ints),
    )


def prefill_steps(prompts: list[list[int]]) -> list[list[int]]:
    """Which prompts run together: as many as fit CHUNK tokens."""
    steps: list[list[int]] = [[]]
    for row, prompt in enumerate(prompts):
        if sum(len(prompts[i]) for i in steps[-1]) + len(prompt) > CHUNK:
            steps.append([])
        steps[-1].append(row)
    return steps


def generate(prompts: list[list[int]], stop: list[int]) -> list[list[int]]:
    """Greedy answers, up to and with one of the tokens `stop`."""
    model = Model(len(prompts))
    answers: list[list[int]] = [[] for _ in prompts]

    def run(rows: list[int], step: Step) -> None:
        for row, token in zip(rows, model.forward(step).tolist(), strict=True):
            answers[row].append(token)

    for rows in prefill_steps(prompts):
        run(rows, make_step([(row, 0, prompts[row]) for row in rows]))
    while True:
        rows = [
            row
            for row, answer in enumerate(answers)
            if answer[-1] not in stop and len(answer) < NEW_TOKENS
        ]
        if not rows:
            return answers
        held = [len(prompts[row]) + len(answers[row]) - 1 for row in rows]
        run(rows, make_step([(r, h, answers[r][-1:]) for r, h in zip(rows, held, strict=True)]))


def clear_prompts(count: int) -> list[dict[str, Any]]:
    """The first recorded rows whose smallest gap is above GAP and that fit a row's pages."""
    rows = json.loads(RECORDED.read_text())["rows"]
    fits = PAGES_A_ROW * PAGE
    clear = [
        row
        for row in rows
        if min(row["gaps"]) > GAP and len(row["prompt"]) + len(row["tokens"]) <= fits
    ]
    if len(clear) < count:
        raise SystemExit(f"{len(clear)} recorded prompts are clear enough, not {count}")
    return clear[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=("gfx942", "gfx950"), default="gfx942")
    parser.add_argument("--prompts", type=int, default=20)
    args = parser.parse_args()
    os.environ["GCN_TARGET"] = args.target
    from tests.gcn import library, triton_driver

    triton_driver.install(args.target)
    import radix_kernels as rk

    rk.set_fallback("error")
    rows = clear_prompts(args.prompts)
    begin = time.monotonic()
    stop = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]
    found = generate([row["prompt"] for row in rows], stop)
    wrong = [i for i, row in enumerate(rows) if row["tokens"] != found[i]]
    facts = library.report()
    for i in wrong:
        print(f"prompt {i}: {found[i]}, recorded {rows[i]['tokens']}")
    print(
        f"{args.target}: {len(rows) - len(wrong)} of {len(rows)} answers,"
        f" {sum(len(row['tokens']) for row in rows)} tokens; {facts['launches']} launches of"
        f" {len(facts['kernels'])} kernels, {facts['instructions']} wave instructions,"
        f" {time.monotonic() - begin:.0f} s"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
