"""Greedy float32 tokens of random Llama, Qwen3 and Mistral checkpoints under every toggle of a
device's engine, against the CPU wheel's.

    python -m tests.gpu.toggle_tokens write FILE
    python -m tests.gpu.toggle_tokens compare FILE --device cuda [--models qwen3] [--toggles eager]

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
from tests.gpu.llama_tokens import LLAMA, wrong_ones
from tests.runtime.demo_tokens import differences

LAYERS = 3
HIDDEN = 256
INNER = 512
HEADS = 4
KV_HEADS = 2
HEAD = 64
VOCABULARY = 1024
CONTEXT = 1024
_COMMON: dict[str, Any] = {
    **LLAMA,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 100},
}
TOGGLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"disable_cuda_graph": True},
    "overlap": {"disable_overlap_schedule": True},
    "page of one": {"page_size": 1},
    "page": {"page_size": 64},
    "chunk": {"chunked_prefill_size": 65},
    "whole prompts": {"chunked_prefill_size": -1},
    "cache": {"disable_radix_cache": True},
    "sizes": {"cuda_graph_bs": [1, 3, 24, 64]},
    "few sizes": {"cuda_graph_max_bs": 9},
    "odd rows": {"max_running_requests": 63},
    "few tokens": {"cuda_graph_max_tokens": 96},
}
Rows = list[dict[str, Any]]


def random_checkpoint(folder: Path, name: str, seed: int = 11) -> Path:
    """A checkpoint of that model whose weights are large enough for clear decisions."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 1.5 / shape[-1] ** 0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=g),
        "lm_head.weight": draw(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        tensors |= {f"{layer}{part}.weight": draw(*shape) for part, shape in shapes.items()}
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{part}.weight"] = torch.ones(HIDDEN)
        if name == "qwen3":
            for part in ("q_norm", "k_norm"):
                tensors[f"{layer}self_attn.{part}.weight"] = 0.5 + torch.rand(HEAD, generator=g)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_COMMON | MODELS[name]))
    return folder


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 500 tokens; some begin alike."""
    rng = random.Random(5)
    shared = rng.choices(range(3, VOCABULARY), k=200)
    return [
        shared[: rng.choice([0, 0, 64, 200])]
        + rng.choices(range(3, VOCABULARY), k=rng.choice([1, 5, 40, 130, 300]))
        for _ in range(count)
    ]


def answers(folder: Path, count: int, device: str, **settings: Any) -> Rows:
    """Tokens of each prompt, and at each token how far apart the two best were."""
    rng = random.Random(6)
    params = [
        SamplingParams(temperature=0, max_new_tokens=rng.randint(1, 40), ignore_eos=True)
        for _ in range(count)
    ]
    options: dict[str, Any] = {
        "device": device,
        "max_running_requests": 64,
        "chunked_prefill_size": 512,
        "max_total_tokens": 1 << 15,
    }
    with Engine(folder, **{**options, **settings}) as engine:
        outputs = engine.generate(
            input_ids=prompts(count),
            sampling_params=params,
            return_logprob=True,
            top_logprobs_num=2,
        )
    rows = []
    for output in outputs:
        tops = output["meta_info"]["output_top_logprobs"]
        gaps = [round(best[0] - second[0], 5) for best, second in tops]
        rows.append({"tokens": output["output_ids"], "gaps": gaps})
    return rows


def write(file: Path, models: list[str], count: int) -> None:
    """Records the CPU's answers."""
    recorded = {}
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            recorded[name] = answers(random_checkpoint(Path(folder), name), count, "cpu")
        print(f"{name}: {count} answers", flush=True)
    file.write_text(json.dumps(recorded))


def compare(file: Path, models: list[str], toggles: list[str], device: str) -> int:
    """How many answers are wrong."""
    recorded: dict[str, Rows] = json.loads(file.read_text())
    total = 0
    for name in models:
        want = recorded[name]
        with tempfile.TemporaryDirectory() as folder:
            random_checkpoint(Path(folder), name)
            for toggle in toggles:
                found = answers(Path(folder), len(want), device, **TOGGLES[toggle])
                parted = differences(want, found)
                wrong = wrong_ones(parted)
                equal = len(want) - len(parted)
                print(f"{name}, {toggle}: {equal} of {len(want)} equal, {len(wrong)} wrong")
                for text in parted:
                    print(f"    {text}")
                sys.stdout.flush()
                total += len(wrong)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--toggles", nargs="+", choices=list(TOGGLES), default=list(TOGGLES))
    parser.add_argument("--prompts", type=int, default=200, help="to write answers to")
    args = parser.parse_args()
    if args.action == "write":
        write(args.file, args.models, args.prompts)
        return
    wrong = compare(args.file, args.models, args.toggles, args.device)
    print(f"{wrong} answers are wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
