"""Quantized checkpoints of small random models, tensor by tensor by the libraries that write such
files (transformers, compressed-tensors) or, where none is to be had, by the format's definition;
and the same models with what the codes stand for, in float32."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.runtime.tiny_models import save

Tensors = dict[str, torch.Tensor]
# weight [N, K] -> the tensors of the file, by suffix, and what they stand for.
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]

_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_192": ("Llama", {"hidden_size": 192}),
    "llama_odd_heads": ("Llama", {"num_key_value_heads": 1, "head_dim": 80}),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
         "norm_topk_prob": True},
    ),
    "qwen3_moe_narrow": (
        "Qwen3Moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 384,
         "norm_topk_prob": True},
    ),
    "qwen3_moe_768": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 768,
         "num_key_value_heads": 4, "norm_topk_prob": True},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
         "v_head_dim": 64, "head_dim": 32, "num_key_value_heads": 4, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 256,
         "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "qwen3_moe_few": (
        "Qwen3Moe",
        {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 384,
         "num_key_value_heads": 4, "norm_topk_prob": True},
    ),
    "qwen3_moe_odd": (
        "Qwen3Moe", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 96},
    ),
    "phi3": ("Phi3", {}),
}  # fmt: skip
# What is quantized: every product of a layer, no router.
PRODUCTS = r"\.layers\.\d+\..*(proj|proj_with_mqa)\.weight$"


def random_model(name: str, seed: int = 0) -> torch.nn.Module:
    """A transformers model with every parameter random."""
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model: torch.nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, param in model.named_parameters():
            param.normal_(1.0 if "norm" in key else 0.0, 0.08)
        for key, buffer in model.named_buffers():
            if key.endswith("correction_bias"):
                buffer.normal_(0.0, 0.3)
    return model


@dataclass(frozen=True)
class Checkpoint:
    """`folder`: the quantized files. `reference`: transformers' model of what they stand for."""

    folder: Path
    reference: Any


def write(
    model: torch.nn.Module,
    folder: Path,
    quantize: Quantize | Callable[[str], Quantize],
    settings: Mapping[str, Any],
    *,
    products: str = PRODUCTS,
    by_name: bool = False,
) -> Checkpoint:
    """The checkpoint of `model` whose `products` are quantized; `by_name`: `quantize` gives the
    function for a name."""
    save(model, folder / "float32")
    tensors = load_file(folder / "float32" / "model.safetensors")
    quantized: Tensors = {}
    widened: Tensors = {}
    for key, tensor in tensors.items():
        if re.search(products, key) is None:
            quantized[key] = tensor
            widened[key] = tensor
            continue
        function: Any = quantize(key) if by_name else quantize  # type: ignore[arg-type]
        module = key.removesuffix(".weight")
        parts, widened[key] = function(tensor)
        quantized |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(widened, folder / "float32" / "model.safetensors", metadata={"format": "pt"})
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "float32", dtype=torch.float32, attn_implementation="eager"
    )
    config = json.loads((folder / "float32" / "config.json").read_text())
    config["quantization_config"] = dict(settings)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(quantized, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(folder=folder, reference=reference.eval())


def fp8_block(
    weight: torch.Tensor, scale_format: str | None = None
) -> tuple[Tensors, torch.Tensor]:
    """By transformers, in blocks of 128 x 128."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    settings = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=scale_format)
    quantizer: Any = SimpleNamespace(quantization_config=settings)
    parts = Fp8Quantize(quantizer).convert({"x.weight": weight})
    codes = parts["x.weight"]
    scales = parts["x.weight_scale_inv"]
    assert codes.dtype == torch.float8_e4m3fn
    widened = Fp8Dequantize(quantizer)._dequantize_one(codes, scales, torch.float32)
    return {"weight": codes, "weight_scale_inv": scales}, widened


def fp8_block_ue8m0(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The same with scales that are powers of two, one byte each."""
    return fp8_block(weight, "ue8m0")


def fp8_odd_block(
    weight: torch.Tensor, *, powers: bool = False, name: str = "weight_scale_inv"
) -> tuple[Tensors, torch.Tensor]:
    """Blocks of 128 x 128 of a weight of any size, by the definition; `powers`: scales are powers
    of two, one byte each."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    widened = torch.empty(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scales[i, j] = weight[block].abs().max() / 448
            if powers:
                scales[i, j] = scales[i, j].log2().ceil().exp2()
            codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            widened[block] = codes[block].float() * scales[i, j]
    return {"weight": codes, name: scales.to(torch.float8_e8m0fnu) if powers else scales}, widened


def fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A scale for the whole tensor, without a dimension; x has one too."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    # Another for each tensor, as calibration gives; large enough for the values of these models.
    of_input = 0.02 + scale / 10
    parts = {"weight": codes, "weight_scale": scale, "input_scale": of_input}
    return parts, codes.float() * scale


FP8_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def compressed(preset: str, **changes: Any) -> tuple[Quantize, dict[str, Any]]:
    """How compressed-tensors quantizes by one of its presets, with `changes` of the weights'
    settings, and the configuration that it writes."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.weights = scheme.weights.model_copy(update=changes)
    packs = preset.startswith(("W4A16", "W8A16"))
    form = "pack-quantized" if packs else "int-quantized"
    if scheme.weights.type == "float":
        form = "float-quantized"
    compressor = BaseCompressor.get_value_from_registry(CompressionFormat(form).value)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], format=form
    ).model_dump()
    is_static = scheme.input_activations is not None and not scheme.input_activations.dynamic

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        low, high = _ranges(weight, scheme.weights)
        scale, zero = calculate_qparams(low, high, scheme.weights)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        parts = compressor.compress(dict(state), scheme)
        widened = compressor.decompress(dict(parts), scheme)["weight"].float()
        if scheme.weights.symmetric:
            parts.pop("weight_zero_point", None)
        if is_static:
            parts["input_scale"] = torch.tensor([0.02 + float(scale.max()) / 10])
        return parts, widened

    return quantize, json.loads(json.dumps(config))


def _ranges(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest value of what shares a scale, as compressed-tensors lays them
    out."""
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "group":
        groups = weight.unflatten(1, (-1, args.group_size))
        return groups.amin(2), groups.amax(2)
    rows, columns = args.block_structure
    blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int [R, C] codes as int32 [R, C * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    split = codes.long().unflatten(1, (-1, per_word))
    words = (split << (bits * torch.arange(per_word))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _asymmetric(
    weight: torch.Tensor, group: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales float16 and zero points [N, groups]."""
    size = weight.shape[1] if group == -1 else group
    groups = weight.unflatten(1, (-1, size))
    low = groups.amin(2).clamp(max=0)
    high = groups.amax(2).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return codes.flatten(1), scales, zeros


def awq(weight: torch.Tensor, group: int = 64) -> tuple[Tensors, torch.Tensor]:
    """AutoAWQ's version gemm, by its definition: inputs first, outputs 0 2 4 6 1 3 5 7 of each
    eight in a word."""
    codes, scales, zeros = _asymmetric(weight, group, 4)
    size = weight.shape[1] if group == -1 else group
    widened = (codes - zeros.repeat_interleave(size, 1)) * scales.float().repeat_interleave(size, 1)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def words(by_output: torch.Tensor) -> torch.Tensor:
        turned = by_output.T.unflatten(1, (-1, 8))[..., order].flatten(1)
        return words_of(turned, 4)

    parts = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.T}
    return parts, widened


def awq_settings(group: int = 64) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def gptq(
    weight: torch.Tensor,
    bits: int = 4,
    group: int = 64,
    *,
    desc_act: bool = False,
    form: str = "gptq",
) -> tuple[Tensors, torch.Tensor]:
    """AutoGPTQ's layers by their definition; with `desc_act` the inputs of a group are anywhere."""
    inputs = weight.shape[1]
    size = inputs if group == -1 else group
    order = torch.arange(inputs)
    if desc_act:
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    codes, scales, zeros = _asymmetric(weight[:, order], group, bits)
    if bits == 8:  # symmetric: no kernel takes other zero points
        largest = weight[:, order].unflatten(1, (-1, size)).abs().amax(2)
        scales = (largest / 127).half()
        zeros = torch.full_like(scales, 128, dtype=torch.float32)
        steps = weight[:, order] / scales.float().repeat_interleave(size, 1)
        codes = (steps.round() + 128).clamp(0, 255)
    offsets = codes - zeros.repeat_interleave(size, 1)
    values = offsets * scales.float().repeat_interleave(size, 1)
    groups = torch.empty(inputs, dtype=torch.int32)
    groups[order] = (torch.arange(inputs) // size).to(torch.int32)
    in_place = torch.empty_like(codes)
    in_place[:, order] = codes
    widened = torch.empty_like(values)
    widened[:, order] = values
    stored = zeros - 1 if form == "gptq" else zeros
    parts = {
        "qweight": words_of(in_place, bits).T,
        "qzeros": words_of(stored.T, bits),
        "scales": scales.T,
        "g_idx": groups,
    }
    return parts, widened


def gptq_settings(bits: int = 4, group: int = 64, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": False,
        "checkpoint_format": "gptq",
        **changes,
    }
