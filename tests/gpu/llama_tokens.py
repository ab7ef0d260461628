"""Greedy float32 tokens of a random Llama, by the CPU wheel and by a device's.

    python -m tests.gpu.llama_tokens write FILE
    python -m tests.gpu.llama_tokens compare FILE --device cuda

Two runs, since a wheel serves one kind of device. An answer may differ only from where the two best
logits are nearly equal; it is reported and compared up to there.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from radix_runtime import Engine, SamplingParams
from tests.runtime.demo_tokens import differences

NEW_TOKENS = 48
CLOSE = 1e-3  # between the two best logprobs: float32 sums in another order may decide otherwise
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Rows = list[dict[str, Any]]


def random_llama(folder: Path) -> Path:
    """A checkpoint whose weights are large enough for clear decisions."""
    c = LLAMA
    g = torch.Generator().manual_seed(11)
    hidden = c["hidden_size"]
    inner = c["intermediate_size"]
    width = c["head_dim"]
    assert isinstance(hidden, int) and isinstance(inner, int) and isinstance(width, int)
    q = 8 * width
    kv = 2 * width

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 1.5 / shape[-1] ** 0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(2048, hidden, generator=g),
        "lm_head.weight": draw(2048, hidden),
    }
    tensors["model.norm.weight"] = torch.ones(hidden)
    for i in range(4):
        layer = f"model.layers.{i}."
        shapes = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        tensors |= {f"{layer}{name}.weight": draw(*shape) for name, shape in shapes.items()}
        tensors |= {
            f"{layer}{name}.weight": torch.ones(hidden)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def answers(engine: Engine) -> Rows:
    """Tokens of eight prompts, and at each token how far apart the two best were."""
    rng = random.Random(3)
    prompts = [rng.choices(range(3, 1500), k=n) for n in (1, 7, 33, 120, 300, 301, 64, 12)]
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = engine.generate(
        input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=2
    )
    tops = [output["meta_info"]["output_top_logprobs"] for output in outputs]
    gaps = [[best[0] - second[0] for best, second in top] for top in tops]
    return [
        {"tokens": output["output_ids"], "gaps": gap}
        for output, gap in zip(outputs, gaps, strict=True)
    ]


def wrong_ones(parted: list[str]) -> list[str]:
    """Of what `differences` says, the places where the two best logits are not nearly equal."""
    return [text for text in parted if float(text.rpartition(" ")[2]) >= CLOSE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "device": args.device,
            "dtype": "float32",
            "max_total_tokens": 8192,
        }
        with Engine(random_llama(Path(folder)), chunked_prefill_size=256, **settings) as engine:
            rows = answers(engine)
    if args.action == "write":
        args.file.write_text(json.dumps(rows))
        return
    want: Rows = json.loads(args.file.read_text())
    parted = differences(want, rows)
    wrong = wrong_ones(parted)
    for text in parted:
        print(text)
    print(
        f"{args.device}: {len(want) - len(parted)} of {len(want)} answers equal, {len(wrong)} wrong"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
