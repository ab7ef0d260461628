"""Steps of an engine, captured and replayed: one of each class of sizes."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from radix_runtime import Engine, SamplingParams

# Heads of 128, as the Hopper kernels take them.
_MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Rows of decode steps: products of one row, of a narrow and of a wide tile, attention with few and
# with many rows; and tokens of steps with chunks.
_ROWS = [1, 2, 8, 16, 40, 72]
_TOKENS = 256
# Tokens of a prompt: a part of a page, a page, what attention splits over blocks, and a chunk that
# is too long for a graph.
_PROMPTS = [1, 16, 17, 130, 700, 2049]


def answers(folder: Path, **settings: Any) -> list[list[int]]:
    """Ids of greedy answers to as many requests as each size has rows, and to long prompts."""
    options: dict[str, Any] = {
        "device": "cuda",
        "load_format": "dummy",
        "random_seed": 1,
        "max_running_requests": max(_ROWS),
        "max_total_tokens": 1 << 14,
        "chunked_prefill_size": 512,
        "cuda_graph_bs": _ROWS,
        "cuda_graph_max_tokens": _TOKENS,
    }
    rng = random.Random(7)
    params = SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True)
    found = []
    with Engine(folder, **{**options, **settings}) as engine:
        print(f"{engine.executor.runner.num_graphs} graphs", flush=True)
        lengths = [[rng.choice([1, 5, 33]) for _ in range(rows)] for rows in _ROWS]
        for batch in [*lengths, *([length] for length in _PROMPTS)]:
            prompts = [rng.choices(range(3, 1000), k=length) for length in batch]
            outputs = engine.generate(input_ids=prompts, sampling_params=params)
            found += [output["output_ids"] for output in outputs]
    return found


def steps() -> None:
    """With graphs and without: the same ids."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(_MODEL))
        replayed = answers(folder)
        queued = answers(folder, disable_cuda_graph=True)
    differing = sum(1 for a, b in zip(replayed, queued, strict=True) if a != b)
    print(f"steps: {len(queued) - differing} of {len(queued)} answers equal", flush=True)
    if differing:
        raise SystemExit(f"steps: {differing} answers differ with and without graphs")
