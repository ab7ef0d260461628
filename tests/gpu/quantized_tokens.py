"""Quantized checkpoints on a GPU against a float32 run of what their codes stand for.

    python -m tests.gpu.quantized_tokens [--formats block channel ...] [--models llama qwen3_moe]

Each format of products in 8 bits is written as a random checkpoint, served in bfloat16 by the
wheel's FP8 or INT8 products and in float32, where every weight is widened: the same codes, nothing
else rounded. For each it prints how far log-probabilities of prompts are apart, and how many greedy
answers are equal; an answer may part only where float32's two best log-probabilities are close.
Exit status 1 if anything is wrong.

Formats of codes (code_formats.py: AWQ, GPTQ, pack-quantized, GGUF, int4 and int8 at load), whose x
is not rounded, are compared with a float32 checkpoint of what the codes stand for: served in
float32 log-probabilities must be the same, in bfloat16 near, replayed from CUDA graphs and queued
kernel by kernel. gpt-oss's MXFP4: `python -m tests.gpu.gpt_oss_tokens`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from radix_runtime import Engine, SamplingParams
from tests.gpu.code_formats import CODES, GGUF, write_gguf

NEW_TOKENS = 32
CLOSE = (
    1.2  # between the two best log-probabilities: x in 8 bits, or another expert, may decide else
)
FAR = 0.35  # of the mean distance of log-probabilities of prompts
# The same of x in 16 bits, and in float32.
CLOSE_16 = 0.5  # of a model without experts
FAR_16 = 0.1
CLOSE_32 = 0.02
FAR_32 = 1e-3
_LARGEST = 448.0
_SIZES: dict[str, Any] = {
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
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
}
Tensors = dict[str, torch.Tensor]


def by_block(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales = blocks.abs().amax((1, 3)) / _LARGEST
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return {"weight": codes.view(weight.shape), "weight_scale_inv": scales}


def by_channel(weight: torch.Tensor) -> Tensors:
    scales = weight.abs().amax(1, keepdim=True) / _LARGEST
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def by_tensor(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max() / _LARGEST
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def in_int8(weight: torch.Tensor) -> Tensors:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def _channel_settings(kind: str) -> dict[str, Any]:
    def args(strategy: str, *, dynamic: bool) -> dict[str, Any]:
        return {"num_bits": 8, "type": kind, "strategy": strategy, "dynamic": dynamic}

    group = {
        "targets": ["Linear"],
        "weights": args("channel", dynamic=False),
        "input_activations": args("token", dynamic=True),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
# How a weight is written, the configuration, and flags of the run in bfloat16.
FORMATS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any], dict[str, Any]]] = {
    "block": (by_block, {**_FP8, "weight_block_size": [128, 128]}, {}),
    "channel": (by_channel, _channel_settings("float"), {}),
    "int8": (in_int8, _channel_settings("int"), {}),
    "tensor": (by_tensor, _FP8, {}),
    "at_load": (lambda weight: {"weight": weight}, {}, {"quantization": "fp8"}),
}


def write(
    folder: Path,
    model: str,
    quantize: Callable[[torch.Tensor], Tensors],
    settings: dict[str, Any],
    head: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Path:
    """A checkpoint whose weights are large enough for clear decisions, already in bfloat16, so that
    both runs read the same. head: what becomes of the vocabulary matrix."""
    folder.mkdir(exist_ok=True)
    config = {**_SIZES, **MODELS[model]}
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator) * 1.5 / shape[-1] ** 0.5
        return values.bfloat16().float()

    hidden = config["hidden_size"]
    tensors: Tensors = {
        "model.embed_tokens.weight": draw(config["vocab_size"], hidden) * hidden**0.5,
        "lm_head.weight": (head or torch.Tensor.float)(draw(config["vocab_size"], hidden)),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in _products(config).items():
            parts = quantize(draw(*shape))
            tensors |= {f"{prefix}.{name}.{suffix}": part for suffix, part in parts.items()}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if "num_experts" in config:
            tensors[f"{prefix}.mlp.gate.weight"] = draw(config["num_experts"], hidden)
            for norm in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{norm}.weight"] = torch.ones(config["head_dim"])
        tensors |= {f"{prefix}.{norm}.weight": torch.ones(hidden) for norm in norms}
    if settings:
        config["quantization_config"] = settings
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _products(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The weights of a layer that are quantized, [outputs, inputs]."""
    hidden = config["hidden_size"]
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
    }
    mlps = [f"mlp.experts.{i}" for i in range(config.get("num_experts", 0))] or ["mlp"]
    for mlp in mlps:
        shapes[f"{mlp}.gate_proj"] = (width, hidden)
        shapes[f"{mlp}.up_proj"] = (width, hidden)
        shapes[f"{mlp}.down_proj"] = (hidden, width)
    return shapes


def prompts() -> list[list[int]]:
    """The same in every run."""
    rng = random.Random(3)
    return [rng.choices(range(3, 1500), k=n) for n in (1, 7, 33, 120, 300, 301, 64, 12)]


def answers(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Of each prompt: the log-probabilities of its tokens, the greedy tokens, and how far the two
    best log-probabilities were apart at each of them."""
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with Engine(
        str(folder),
        skip_tokenizer_init=True,
        max_total_tokens=8192,
        chunked_prefill_size=256,
        **settings,
    ) as engine:
        outputs = engine.generate(
            input_ids=prompts(),
            sampling_params=params,
            return_logprob=True,
            top_logprobs_num=2,
            logprob_start_len=0,
        )
    rows = []
    for output in outputs:
        meta = output["meta_info"]
        tops = meta["output_top_logprobs"]
        rows.append(
            {
                "prompt": [entry[0] for entry in meta["input_token_logprobs"] if entry[0]],
                "tokens": output["output_ids"],
                "gaps": [best[0] - second[0] for best, second in tops],
            }
        )
    return rows


def compare(
    expected: list[dict[str, Any]],
    found: list[dict[str, Any]],
    *,
    close: float = CLOSE,
    far: float = FAR,
) -> tuple[str, bool]:
    """What to print, and whether all is well."""
    distances = []
    equal = 0
    far_apart = []
    for want, have in zip(expected, found, strict=True):
        pairs = zip(want["prompt"], have["prompt"], strict=True)
        distances += [abs(a - b) for a, b in pairs]
        parted = [i for i in range(NEW_TOKENS) if want["tokens"][i] != have["tokens"][i]]
        if not parted:
            equal += 1
        elif want["gaps"][parted[0]] > close:
            far_apart.append(round(want["gaps"][parted[0]], 2))
    mean = sum(distances) / len(distances)
    text = (
        f"log-probabilities of {len(distances)} tokens of prompts {mean:.3f} apart on average, "
        f"{max(distances):.2f} at most; {equal} of {len(expected)} answers equal, parted at a "
        f"clear gap: {far_apart or 'none'}"
    )
    return text, mean < far and not far_apart


def check_products(model: str, form: str, device: str) -> bool:
    """Prints a line about a format of FP8 or INT8 products; whether all is well."""
    quantize, settings, flags = FORMATS[form]
    with tempfile.TemporaryDirectory() as home:
        folder = write(Path(home), model, quantize, settings)
        expected = answers(folder, device=device, dtype="float32")
        found = answers(folder, device=device, dtype="bfloat16", **flags)
    return tell(f"{model} {form}", *compare(expected, found))


def check_codes(model: str, form: str, device: str) -> bool:
    """Prints the lines about a format of codes; whether all is well."""
    codes = CODES[form]
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        held = write(folder / "codes", model, lambda w: codes.quantize(w)[0], codes.settings)
        floats = write(
            folder / "floats", model, lambda w: {"weight": codes.quantize(w)[1]}, {}, codes.head
        )
        close = CLOSE if "num_experts" in MODELS[model] else CLOSE_16
        return against_floats(f"{model} {form}", held, floats, device, codes.flags, close)


def check_gguf(form: str, device: str) -> bool:
    """Prints the lines about a GGUF file; whether all is well."""
    with tempfile.TemporaryDirectory() as home:
        try:
            path, floats = write_gguf(Path(home), GGUF[form])
        except ImportError as error:
            return tell(f"llama {form}", f"not run: {error}", True)
        return against_floats(f"llama {form}", path, floats, device, {}, CLOSE_16)


def against_floats(
    name: str, held: Path, floats: Path, device: str, flags: dict[str, Any], close: float
) -> bool:
    """Codes beside what they stand for."""
    expected = answers(floats, device=device, dtype="float32")
    found = answers(held, device=device, dtype="float32", **flags)
    rounds_x = device == "cpu" and "quantization" in flags  # to 8 bits, whatever the dtype
    limits = {"close": CLOSE, "far": FAR} if rounds_x else {"close": CLOSE_32, "far": FAR_32}
    good = tell(f"{name} float32", *compare(expected, found, **limits))
    runs: dict[str, dict[str, Any]] = {"bfloat16": {}}
    if device != "cpu":
        runs["bfloat16 queued"] = {"disable_cuda_graph": True}
    for run, settings in runs.items():
        found = answers(held, device=device, dtype="bfloat16", **flags, **settings)
        text = compare(expected, found, close=close, far=FAR_16)
        good &= tell(f"{name} {run}", *text)
    return good


def tell(name: str, text: str, good: bool) -> bool:
    """Prints a line; whether it is a good one."""
    print(f"{'ok   ' if good else 'WRONG'} {name}: {text}", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    formats = [*FORMATS, *CODES, *GGUF]
    parser.add_argument("--formats", nargs="+", choices=formats, default=formats)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    runs: list[tuple[str, Callable[[], bool]]] = []
    for model in args.models:
        for form in args.formats:
            if form in FORMATS:
                runs.append((f"{model} {form}", partial(check_products, model, form, args.device)))
            elif form in CODES:
                runs.append((f"{model} {form}", partial(check_codes, model, form, args.device)))
    for form in args.formats:
        if form in GGUF:
            runs.append((f"llama {form}", partial(check_gguf, form, args.device)))
    found = [run_or_tell(name, check) for name, check in runs]
    sys.exit(not all(found))


def run_or_tell(name: str, check: Callable[[], bool]) -> bool:
    """What `check` says; False, and a line, where it raises: the other formats still run."""
    try:
        return check()
    except Exception as error:
        traceback.print_exc()
        return tell(name, f"{type(error).__name__}: {error}", False)


if __name__ == "__main__":
    main()
