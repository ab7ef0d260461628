"""Small random checkpoints of every family that the runtime reads, as transformers writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from radix_runtime.model_config import ModelConfig
from radix_runtime.specs import ModelSpec

# name -> (directory, transformers model)
Checkpoints = Callable[[str], tuple[Path, Any]]

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def _rope(kind: str, theta: float = 1e4, **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **settings}


# Latent attention: sizes of which no two are equal.
_MLA = {
    **_EXPERTS, "kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 80, "num_key_value_heads": 4, "n_routed_experts": 12, "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
}  # fmt: skip
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=32)
_MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 5.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
}


_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
    "out_hidden_size": 64,
}
_MROPE = {"head_dim": 16, "rope_parameters": _rope("default", mrope_section=[2, 3, 3])}


@dataclass(frozen=True)
class FamilyModel:
    """`name`: what transformers calls it, before Config and ForCausalLM. `changes`: of the sizes
    that most have. `vision`: the `vision_config` of a multimodal model, whose text this is;
    `outer`: further keys beside the two."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    config_class: str | None = None
    vision: Mapping[str, Any] | None = None
    outer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """What config.json names."""
        suffix = "ForCausalLM" if self.vision is None else "ForConditionalGeneration"
        return f"{self.name}{suffix}"

    def config(self) -> Any:
        """transformers' configuration."""
        config_class = getattr(transformers, self.config_class or f"{self.name}Config")
        sizes = {**_SIZES, **self.changes}
        if self.vision is None:
            return config_class(**sizes)
        return config_class(text_config=sizes, vision_config=dict(self.vision), **self.outer)


FAMILY_MODELS: dict[str, FamilyModel] = {
    "llama": FamilyModel("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": FamilyModel("Mistral", {"sliding_window": 7}),
    "qwen2": FamilyModel("Qwen2"),
    "qwen3": FamilyModel("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": FamilyModel(
        "Qwen3Moe", {**_EXPERTS, "num_experts": 6, "head_dim": 32, "norm_topk_prob": True}
    ),
    "qwen3_moe_mixed": FamilyModel(
        "Qwen3Moe",
        {**_EXPERTS, "num_experts": 6, "head_dim": 32, "mlp_only_layers": [0],
         "decoder_sparse_step": 2},
    ),
    "qwen3_moe_odd_width": FamilyModel(
        "Qwen3Moe", {**_EXPERTS, "num_experts": 5, "head_dim": 32, "moe_intermediate_size": 33}
    ),
    "mixtral": FamilyModel("Mixtral", {"num_local_experts": 5, "sliding_window": 9}),
    "qwen2_moe": FamilyModel(
        "Qwen2Moe",
        {**_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 64,
         "norm_topk_prob": False},
    ),
    "gemma1": FamilyModel("Gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": FamilyModel(
        "Gemma2",
        {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 20,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
         "tie_word_embeddings": True},
    ),
    "gemma3": FamilyModel(
        "Gemma3",
        {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 20, "layer_types": _TYPES,
         "rope_parameters": {
             "full_attention": _rope("linear", 1e5, factor=8.0),
             "sliding_attention": _rope("default", 1e3)}},
        config_class="Gemma3TextConfig",
    ),
    "olmo2": FamilyModel("Olmo2"),
    "olmo2_repeated_kv": FamilyModel("Olmo2", {"num_key_value_heads": 1}),
    "olmo3": FamilyModel("Olmo3", {"sliding_window": 9, "rope_parameters": {
        "full_attention": _YARN, "sliding_attention": _rope("default")}}),
    "olmoe": FamilyModel(
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 3, "attention_bias": True,
         "norm_topk_prob": False},
    ),
    "olmoe_normed": FamilyModel(
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4,
         "norm_topk_prob": True},
    ),
    "smollm3": FamilyModel("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3_window": FamilyModel(
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1, 1], "use_sliding_window": True, "sliding_window": 9,
         "layer_types": _TYPES, "attention_bias": True, "mlp_bias": True},
    ),
    "granite": FamilyModel("Granite", _MULTIPLIERS),
    "granite_moe": FamilyModel(
        "GraniteMoe",
        {**_MULTIPLIERS, "attention_bias": True, "num_local_experts": 6, "num_experts_per_tok": 3,
         "intermediate_size": 48},
    ),
    "granite_moe_odd_width": FamilyModel(
        "GraniteMoe", {**_MULTIPLIERS, "num_local_experts": 5, "intermediate_size": 33}
    ),
    "phi3": FamilyModel("Phi3", {"sliding_window": 11}),
    "phi3_longrope": FamilyModel(
        "Phi3",
        {"original_max_position_embeddings": 16, "tie_word_embeddings": True, "rope_parameters": {
            **_rope("longrope", partial_rotary_factor=0.75,
                    original_max_position_embeddings=16),
            "short_factor": [1.0 + 0.1 * i for i in range(6)],
            "long_factor": [1.5 + 0.7 * i for i in range(6)]}},
    ),
    "seed_oss": FamilyModel("SeedOss", {"head_dim": 32}),
    "ernie4_5": FamilyModel("Ernie4_5", {"head_dim": 32, "use_bias": True}),
    "exaone4": FamilyModel("Exaone4", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "exaone4_full": FamilyModel(
        "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}
    ),
    "glm": FamilyModel("Glm", {"head_dim": 32}),
    "glm4": FamilyModel("Glm4", {"head_dim": 32}),
    "glm4_moe": FamilyModel(
        "Glm4Moe",
        {**_EXPERTS, "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True,
         "attention_bias": True},
    ),
    "deepseek_v2_lite": FamilyModel(
        "DeepseekV2",
        {**_MLA, "q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 1,
         "attention_bias": True, "rope_parameters": {**_YARN, "mscale": 0.707,
                                                     "mscale_all_dim": 0.707}},
    ),
    "deepseek_v2": FamilyModel(
        "DeepseekV2",
        {**_MLA, "q_lora_rank": 64, "topk_method": "group_limited_greedy", "n_group": 4,
         "topk_group": 2},
    ),
    "deepseek_v3": FamilyModel(
        "DeepseekV3",
        {**_MLA, "q_lora_rank": 64, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2,
         "attention_bias": True,
         "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.6}},
    ),
    "kimi_k2": FamilyModel(
        "DeepseekV3",
        {**_MLA, "q_lora_rank": None, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
         "kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_interleave": False},
    ),
    "glm4_moe_lite": FamilyModel(
        "Glm4MoeLite",
        {**_MLA, "q_lora_rank": 48, "kv_lora_rank": 256,
         "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    ),
    "dots1": FamilyModel(
        "Dots1",
        {**_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
         "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
         "routed_scaling_factor": 1.7, "attention_bias": True, "sliding_window": 9,
         "max_window_layers": 2},
    ),
    "minimax_m2": FamilyModel(
        "MiniMaxM2",
        {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2,
         "rope_parameters": _rope("default", partial_rotary_factor=0.5)},
    ),
    "ministral": FamilyModel(
        "Ministral", {"head_dim": 32, "sliding_window": 9, "layer_types": _TYPES}
    ),
    "ministral3": FamilyModel("Ministral3", {"head_dim": 32, "rope_parameters": {
        **_rope("yarn", factor=16.0, original_max_position_embeddings=16, mscale=1.0,
                mscale_all_dim=1.0), "llama_4_scaling_beta": 0.3}}),
    "gpt_oss": FamilyModel(
        "GptOss",
        {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9,
         "intermediate_size": 32, "rope_parameters": {**_YARN, "truncate": False}},
    ),
    "gpt_oss_odd_width": FamilyModel(
        "GptOss",
        {"head_dim": 32, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 9,
         "intermediate_size": 33, "rope_parameters": {**_YARN, "truncate": False}},
    ),
    "gemma3_vl": FamilyModel(
        "Gemma3", {"head_dim": 32, "sliding_window": 9, "sliding_window_pattern": 2},
        vision=_VISION, outer={"mm_tokens_per_image": 4},
    ),
    "mistral3_vl": FamilyModel(
        "Mistral3", {"head_dim": 32, "model_type": "ministral3"},
        vision={**_VISION, "model_type": "pixtral"},
    ),
    "qwen2_vl": FamilyModel(
        "Qwen2VL", _MROPE, vision={**_VISION, "embed_dim": 32, "hidden_size": 64}
    ),
    "qwen2_5_vl": FamilyModel("Qwen2_5_VL", _MROPE, vision=_VISION),
    "qwen3_vl": FamilyModel(
        "Qwen3VL", _MROPE, vision={**_VISION, "deepstack_visual_indexes": [0]}
    ),
    "qwen3_vl_moe": FamilyModel(
        "Qwen3VLMoe",
        {**_MROPE, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 48},
        vision={**_VISION, "deepstack_visual_indexes": [0]},
    ),
}  # fmt: skip


def spec_of(name: str) -> ModelSpec:
    """What the runtime makes of a model's configuration."""
    model = FAMILY_MODELS[name]
    raw = {**model.config().to_dict(), "architectures": [model.architecture]}
    return ModelConfig.from_dict(raw).spec


def random_model(name: str | FamilyModel, seed: int = 0) -> torch.nn.Module:
    """A transformers model with every parameter random: norms, biases and sinks too."""
    model = FAMILY_MODELS[name] if isinstance(name, str) else name
    return random_model_of(model.architecture, model.config(), seed)


def random_model_of(architecture: str, config: Any, seed: int = 0) -> torch.nn.Module:
    """A random model of transformers' configuration."""
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the other takes no odd widths
    torch.manual_seed(seed)
    built: torch.nn.Module = getattr(transformers, architecture)(config)
    is_gemma = architecture.startswith("Gemma")
    with torch.no_grad():
        for key, param in built.named_parameters():
            center = 1.0 if "norm" in key and not is_gemma else 0.0
            spread = 1.0 if "sinks" in key else 0.15
            param.normal_(center, spread)
        for key, buffer in built.named_buffers():
            if key.endswith("correction_bias"):
                buffer.normal_(0.0, 0.3)
    return built.float().eval()
