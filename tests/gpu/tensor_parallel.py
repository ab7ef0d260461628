"""Tensor parallelism of the engine on GPUs: the tokens of one rank, decode time beside NCCL, a rank that dies.

    python -m tests.gpu.tensor_parallel --ranks 2 4

The models are the embedded one and a random Llama, in float32: their greedy tokens are the same for any number of
ranks, but where the two best logits are nearly equal (those prompts are told and compared up to there).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from radix_runtime import Engine, SamplingParams
from radix_runtime.errors import EngineDeadError

GREEDY = SamplingParams(temperature=0, max_new_tokens=48, ignore_eos=True)
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "float32",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def random_llama(folder: Path) -> Path:
    """A checkpoint whose weights are large enough for clear decisions."""
    c, g = LLAMA, torch.Generator().manual_seed(11)
    hidden, inner, width = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    assert isinstance(hidden, int) and isinstance(inner, int) and isinstance(width, int)
    q, kv = 8 * width, 2 * width

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 1.5 / shape[-1] ** 0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(2048, hidden, generator=g),
        "lm_head.weight": draw(2048, hidden),
    }
    tensors["model.norm.weight"] = torch.ones(hidden)
    for i in range(4):
        layer = f"model.layers.{i}."
        shapes = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
                  "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
                  "mlp.down_proj": (hidden, inner)}  # fmt: skip
        tensors |= {f"{layer}{name}.weight": draw(*shape) for name, shape in shapes.items()}
        tensors |= {
            f"{layer}{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")
        }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def engine(model: Path | None, ranks: int, **more: object) -> Engine:
    settings = {"dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 16, "chunked_prefill_size": 256}
    return Engine(model, device="cuda", tp_size=ranks, **{**settings, **more})


def tokens(model: Path | None, ranks: int) -> list[list[int]]:
    rng = random.Random(3)
    prompts = [rng.choices(range(3, 1500), k=n) for n in (1, 7, 33, 120, 300, 301, 64, 12)]
    with engine(model, ranks) as e:
        return [answer["output_ids"] for answer in e.generate(input_ids=prompts, sampling_params=GREEDY)]


def check_tokens(name: str, model: Path | None, worlds: list[int]) -> bool:
    want = tokens(model, 1)
    good = True
    for ranks in worlds:
        got = tokens(model, ranks)
        same = sum(a == b for a, b in zip(got, want, strict=True))
        good &= same == len(want)
        print(
            f"{name}: TP {ranks}: {same} of {len(want)} prompts have TP 1's {GREEDY.max_new_tokens} tokens", flush=True
        )
    return good


def decode_time(ranks: int, nccl: bool, count: int = 200) -> float:
    """Milliseconds a token of one request of the embedded model."""
    params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
    with engine(None, ranks, dtype="bfloat16", disable_custom_all_reduce=nccl) as e:
        e.generate(input_ids=[5, 6, 7], sampling_params=params)
        start = time.perf_counter()
        e.generate(input_ids=[5, 6, 8], sampling_params=params)
        return (time.perf_counter() - start) / count * 1e3


def check_death(ranks: int) -> bool:
    with engine(None, ranks) as e:
        stream = e.stream(input_ids=[3, 4, 5], sampling_params=SamplingParams(max_new_tokens=1500, ignore_eos=True))
        next(stream)
        pid = e._executor.workers[-1].pid
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        try:
            list(stream)
        except EngineDeadError as error:
            took = time.monotonic() - start
            print(f"TP {ranks}: rank killed: {error} after {took:.2f} s", flush=True)
            return took < 5
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        good = check_tokens("random Llama", random_llama(Path(folder)), args.ranks)
    good &= check_tokens("embedded model", None, args.ranks)
    for ranks in args.ranks:
        good &= check_death(ranks)
    print(f"batch-1 decode, embedded model, ms a token: TP 1 {decode_time(1, False):.3f}", flush=True)
    for ranks in args.ranks:
        print(f"  TP {ranks}: {decode_time(ranks, False):.3f}, by NCCL {decode_time(ranks, True):.3f}", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
