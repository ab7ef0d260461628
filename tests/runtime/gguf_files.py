"""GGUF files of small random models, written by llama.cpp's Python package: its names, its keys,
its quantizers. What llama.cpp's converter does to tensors beside that is done here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from tests.runtime.family_models import FAMILY_MODELS, FamilyModel, random_model
from tests.runtime.gguf_conversion import converted_tensors

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
_TYPES = ["sliding_attention", "full_attention"]
# Sizes of latent attention of which every small type takes whole blocks.
_LATENT = {"kv_lora_rank": 64, "v_head_dim": 64, "moe_intermediate_size": 64,
           "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
           "attention_bias": False}  # fmt: skip
_LATENT_KEYS = {
    "attention.kv_lora_rank": 64, "expert_count": 12, "expert_used_count": 3,
    "expert_feed_forward_length": 64, "expert_weights_scale": 1.7, "rope.dimension_count": 16,
}  # fmt: skip
_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
# How far from zero random codes reach, so that their elements spread as other weights do.
_SMALL_TYPES = {"Q4_K": (144, 4e-4, 7.5), "Q5_K": (176, 2e-4, 15.5), "Q6_K": (210, 4.5e-5, 0)}

Quantize = Callable[[str, np.ndarray], tuple[np.ndarray, str]]


@dataclass(frozen=True)
class GgufCase:
    """`model`: its name among FAMILY_MODELS; `arch`: what GGUF calls it; `pairs_heads`: whether the
    converter turns the rows of queries and keys; `keys`: metadata besides what all have; `drafts`:
    whether a layer that drafts tokens is counted behind the others; `splits_latents`: whether the
    product from latent values to keys and values is in two tensors, as in newer files."""

    model: str
    arch: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    pairs_heads: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)
    drafts: bool = False
    splits_latents: bool = False

    @property
    def family(self) -> FamilyModel:
        """The model before the changes."""
        return FAMILY_MODELS.get(self.model, FamilyModel("Llama"))


CASES = {
    "llama": GgufCase("llama_plain", "llama", pairs_heads=True),
    "llama31": GgufCase(
        "llama_plain", "llama", pairs_heads=True,
        changes={"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "mixtral": GgufCase(
        "mixtral", "llama", pairs_heads=True, changes={"sliding_window": None},
        keys={"expert_count": 5, "expert_used_count": 2},
    ),
    "qwen2": GgufCase("qwen2", "qwen2"),
    "qwen2_yarn": GgufCase(
        "qwen2", "qwen2",
        changes={"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                     "original_max_position_embeddings": 32}},
        keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
              "rope.scaling.original_context_length": 32},
    ),
    "qwen2moe": GgufCase(
        "qwen2_moe", "qwen2moe",
        changes={**_EXPERTS, "shared_expert_intermediate_size": 256},
        keys={"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
              "expert_shared_feed_forward_length": 256},
    ),
    "qwen3": GgufCase("qwen3", "qwen3"),
    "qwen3moe": GgufCase(
        "qwen3_moe", "qwen3moe", changes=_EXPERTS,
        keys={"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256},
    ),
    "gemma": GgufCase("gemma1", "gemma"),
    "gemma2": GgufCase(
        "gemma2", "gemma2", changes={"query_pre_attn_scalar": 64},
        keys={"attention.sliding_window": 9, "attn_logit_softcapping": 2.0,
              "final_logit_softcapping": 3.0},
    ),
    "gemma3": GgufCase(
        "gemma3", "gemma3",
        changes={
            "query_pre_attn_scalar": 64, "num_hidden_layers": 6, "tie_word_embeddings": True,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        keys={"attention.sliding_window": 9, "rope.scaling.type": "linear",
              "rope.scaling.factor": 8.0, "rope.freq_base": 1e6},
    ),
    "granite": GgufCase(
        "granite", "granite", pairs_heads=True,
        keys={"embedding_scale": 12.0, "logit_scale": 5.0, "residual_scale": 0.22,
              "attention.scale": 0.3},
    ),
    "granite_moe": GgufCase(
        "granite_moe", "granitemoe", pairs_heads=True,
        changes={"attention_bias": False, "intermediate_size": 256},
        keys={"embedding_scale": 12.0, "logit_scale": 5.0, "residual_scale": 0.22,
              "attention.scale": 0.3, "expert_count": 6, "expert_used_count": 3},
    ),
    "olmo2": GgufCase("olmo2", "olmo2"),
    "olmoe": GgufCase(
        "olmoe", "olmoe", changes={"attention_bias": False, "num_key_value_heads": 4},
        keys={"expert_count": 6, "expert_used_count": 3},
    ),
    "phi3": GgufCase("phi3", "phi3", keys={"attention.sliding_window": 11}),
    "phi3_longrope": GgufCase(
        "phi3_longrope", "phi3",
        changes={"rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
            "short_factor": [1.0 + 0.1 * i for i in range(32)],
            "long_factor": [1.5 + 0.7 * i for i in range(32)]}},
        keys={"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 2.0**0.5},
    ),
    "deepseek2_lite": GgufCase(
        "deepseek_v2_lite", "deepseek2", splits_latents=True, changes=_LATENT,
        keys={**_LATENT_KEYS, **_YARN, "expert_shared_count": 2, "leading_dense_block_count": 1,
              "rope.scaling.yarn_log_multiplier": 0.0707, "attention.head_count_kv": 1,
              "attention.key_length": 80, "attention.value_length": 64,
              "attention.key_length_mla": 48, "attention.value_length_mla": 64},
    ),
    "deepseek2_of_2024": GgufCase(
        "deepseek_v2_lite", "deepseek2", changes=_LATENT,
        keys={**_LATENT_KEYS, **_YARN, "expert_shared_count": 2, "leading_dense_block_count": 1,
              "rope.scaling.yarn_log_multiplier": 0.0707, "attention.head_count_kv": 4,
              "attention.key_length": 48, "attention.value_length": 64},
    ),
    "deepseek3": GgufCase(
        "deepseek_v3", "deepseek2", splits_latents=True, drafts=True,
        changes={**_LATENT, "first_k_dense_replace": 1, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.6,
            "original_max_position_embeddings": 32, "mscale_all_dim": 0.6}},
        keys={**_LATENT_KEYS, **_YARN, "expert_shared_count": 1, "leading_dense_block_count": 1,
              "rope.scaling.yarn_log_multiplier": 0.06, "attention.head_count_kv": 1,
              "attention.q_lora_rank": 64, "expert_gating_func": 2, "expert_weights_norm": True,
              "expert_group_count": 4, "expert_group_used_count": 2, "nextn_predict_layers": 1,
              "attention.key_length": 80, "attention.value_length": 64,
              "attention.key_length_mla": 48, "attention.value_length_mla": 64},
    ),
    "dots1": GgufCase(
        "dots1", "dots1",
        changes={"moe_intermediate_size": 256, "layer_types": ["full_attention"] * 2,
                 "attention_bias": False, "num_key_value_heads": 4},
        keys={"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 256,
              "expert_shared_count": 2, "leading_dense_block_count": 1, "expert_gating_func": 2,
              "expert_weights_scale": 1.7, "expert_weights_norm": True,
              "expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "ernie4_5": GgufCase("ernie4_5", "ernie4_5", changes={"use_bias": False}),
    "exaone4": GgufCase(
        "exaone4", "exaone4",
        changes={"sliding_window": 9, "layer_types": _TYPES, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
        keys={"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False]},
    ),
    "exaone4_full": GgufCase(
        "exaone4_full", "exaone4", changes={"layer_types": ["full_attention"] * 2},
    ),
    "glm4": GgufCase("glm4", "glm4"),
    "glm4moe": GgufCase(
        "glm4_moe", "glm4moe", drafts=True,
        changes={"moe_intermediate_size": 256, "first_k_dense_replace": 1},
        keys={"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 256,
              "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2,
              "expert_weights_scale": 1.7, "expert_weights_norm": True, "nextn_predict_layers": 1,
              "expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "gpt_oss": GgufCase(
        "gpt_oss", "gpt-oss", changes={"layer_types": _TYPES},
        keys={"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
              "attention.sliding_window": 9, **_YARN},
    ),
    "minimax_m2": GgufCase(
        "minimax_m2", "minimax-m2",
        keys={"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
              "expert_gating_func": 2},
    ),
    "mistral3": GgufCase(
        "ministral3", "mistral3", pairs_heads=True,
        keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0,
              "rope.scaling.original_context_length": 16,
              "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3},
    ),
    "mistral3_plain": GgufCase(
        "mistral", "mistral3", pairs_heads=True, changes={"sliding_window": None},
    ),
    "olmo3": GgufCase(
        "olmo3", "olmo2", changes={"layer_types": _TYPES},
        keys={"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False],
              "rope.freq_base": 1e4, **_YARN},
    ),
    "qwen2vl": GgufCase(
        "qwen2", "qwen2vl", keys={"rope.dimension_sections": [8, 12, 12, 0]}
    ),
    "qwen3vl": GgufCase(
        "qwen3", "qwen3vl",
        keys={"n_deepstack_layers": 3, "rope.dimension_sections": [24, 20, 20, 0]},
    ),
    "qwen3vlmoe": GgufCase(
        "qwen3_moe", "qwen3vlmoe", changes=_EXPERTS,
        keys={"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
              "n_deepstack_layers": 3},
    ),
    "seed_oss": GgufCase("seed_oss", "seed_oss"),
    "smollm3": GgufCase(
        "smollm3", "smollm3", pairs_heads=True,
        changes={"num_hidden_layers": 4, "no_rope_layer_interval": 4},
    ),
}  # fmt: skip


def gguf_model(case: GgufCase, seed: int = 0) -> Any:
    """The transformers model of a case, random, in sizes of which every type takes whole blocks."""
    base = case.family
    changes = {**base.changes, **SIZES, **case.changes}
    model = random_model(FamilyModel(base.name, changes, config_class=base.config_class), seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(0.4)  # it is wider than the other tests' models
    return model


def as_floats(kind: str = "F32") -> Quantize:
    """Every matrix in one float type."""

    def quantize(name: str, values: np.ndarray) -> tuple[np.ndarray, str]:
        return gguf.quantize(values, GGMLQuantizationType[kind]), kind

    return quantize


def as_codes(*kinds: str, seed: int = 0) -> Quantize:
    """The matrices in these types in turn. The package has no quantizer for the K types, so their
    codes are random."""
    rng = np.random.default_rng(seed)
    turn = 0

    def quantize(name: str, values: np.ndarray) -> tuple[np.ndarray, str]:
        nonlocal turn
        kind = kinds[turn % len(kinds)]
        turn += 1
        if kind in _SMALL_TYPES:
            return random_blocks(kind, values.shape, rng), kind
        return gguf.quantize(values, GGMLQuantizationType[kind]), kind

    return quantize


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Blocks of random codes of a K type, uint8, for elements of `shape`."""
    size, scale, center = _SMALL_TYPES[kind]
    rows = shape[-1] // GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    blocks = rng.integers(0, 256, (*shape[:-1], rows, size), dtype=np.uint8)
    factor = rng.uniform(0.7, 1.3, (*shape[:-1], rows, 1))
    scales = (factor * scale).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        blocks[..., 208:210] = scales
    else:
        blocks[..., :2] = scales
        blocks[..., 2:4] = (factor * scale * center).astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], rows * size)


def write_gguf(path: Path, case: GgufCase, model: Any, quantize: Quantize) -> Path:
    """Writes the model, and gives it the values that are in the file then."""
    config = model.config
    writer = GGUFWriter(path, case.arch)
    _write_sizes(writer, config, case)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == case.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    if case.drafts:
        name = f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight"
        writer.add_tensor(name, np.ones((64, 64), np.float32))
    for name, tensor in converted_tensors(model, splits_latents=case.splits_latents):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        heads = _heads_of(name, config) if case.pairs_heads else None
        with torch.no_grad():
            tensor.copy_(_write(writer, found, tensor, quantize, heads=heads, case=case))
    _write_rope_factors(writer, config, case)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write(
    writer: GGUFWriter,
    name: str,
    tensor: torch.Tensor,
    quantize: Quantize,
    *,
    heads: int | None,
    case: GgufCase,
) -> torch.Tensor:
    """Adds a tensor; what a reader gets of it."""
    values = tensor.detach().float()
    shift = 1.0 if case.arch.startswith("gemma") and name.endswith("norm.weight") else 0.0
    if heads is not None:
        values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if name.endswith("ffn_gate_inp_shexp.weight"):
        values = values[0]
    data = values.numpy() + np.float32(shift)
    is_matrix = data.ndim > 1 and "ffn_gate_inp" not in name and not name.endswith(".bias")
    if not is_matrix:
        writer.add_tensor(name, data)
        return tensor
    stored, kind = quantize(name, data)
    writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[kind])
    read = torch.from_numpy(gguf.dequantize(stored, GGMLQuantizationType[kind]).copy())
    read = read.view(values.shape)
    if heads is not None:
        read = read.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return read


def _heads_of(name: str, config: Any) -> int | None:
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in name else None


def _write_sizes(writer: GGUFWriter, config: Any, case: GgufCase) -> None:
    writer.add_block_count(config.num_hidden_layers + int(case.drafts))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if "attention.kv_lora_rank" not in case.keys:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(SIZES["head_dim"])
        writer.add_value_length(SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    share = rope.get("partial_rotary_factor", 1.0)
    if "rope.dimension_count" not in case.keys:
        writer.add_rope_dimension_count(int(share * SIZES["head_dim"]))
    writer.add_file_type(1)
    if "rope.freq_base" not in case.keys:
        writer.add_rope_freq_base(rope.get("rope_theta", 1e4))
    add: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string, int: writer.add_uint32, float: writer.add_float32,
        bool: writer.add_bool, list: writer.add_array,
    }  # fmt: skip
    for key, value in case.keys.items():
        add[type(value)](f"{case.arch}.{key}", value)


def _write_rope_factors(writer: GGUFWriter, config: Any, case: GgufCase) -> None:
    """The tensors that divide the frequencies of RoPE."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        for key in ("long", "short"):
            factors = np.array(rope[f"{key}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{key}.weight", factors)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope))


def _llama3_factors(rope: Mapping[str, Any]) -> np.ndarray:
    """What each frequency of Llama 3.1 is divided by: its wavelength says how much."""
    half = SIZES["head_dim"] // 2
    frequencies = rope["rope_theta"] ** -(np.arange(half) / half)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low = rope["low_freq_factor"]
    smooth = (turns - low) / (rope["high_freq_factor"] - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(smooth >= 1, 1.0, np.where(smooth <= 0, rope["factor"], between))
    return factors.astype(np.float32)
