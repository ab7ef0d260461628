"""The architectures of GGUF files whose models are mixtures of experts: what their metadata says
beyond that of all others."""

from typing import Any

from ..errors import ConfigError
from . import names
from .header import GgufFile
from .keys import OF_IMAGES, GgufModel, Read, describe, layer_types_of, rope_scaling
from .metadata import Metadata

# llama.cpp's numbers in `expert_gating_func`.
_SOFTMAX = 1
_SIGMOID = 2


def qwen_moe(model_class: str, *, renormalize: bool) -> Read:
    def read(file: GgufFile, metadata: Metadata) -> GgufModel:
        metadata.ignore(*OF_IMAGES)
        experts: dict[str, Any] = {
            "num_experts": metadata.size("expert_count"),
            "num_experts_per_tok": metadata.size("expert_used_count"),
            "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
            "norm_topk_prob": renormalize,
        }
        shared = "expert_shared_feed_forward_length"
        if metadata.has(shared):
            experts["shared_expert_intermediate_size"] = metadata.size(shared)
        return describe(file, metadata, model_class, names.pre_norm_names(), **experts)

    return read


def olmoe(file: GgufFile, metadata: Metadata) -> GgufModel:
    return describe(
        file,
        metadata,
        "OlmoeForCausalLM",
        names.pre_norm_names(),
        num_experts=metadata.size("expert_count"),
        num_experts_per_tok=metadata.size("expert_used_count"),
    )


def dots1(file: GgufFile, metadata: Metadata) -> GgufModel:
    """dots.llm1. GGUF has no key for its windows; no published model has any."""
    _require_sigmoid(file, metadata)
    return describe(
        file,
        metadata,
        "Dots1ForCausalLM",
        names.pre_norm_names(),
        max_window_layers=metadata.size("block_count"),
        attention_bias=file.has_tensor("blk.0.attn_q.bias"),
        n_shared_experts=metadata.size("expert_shared_count", 1),
        **_routed_experts(metadata),
        **_sigmoid_routing(metadata),
    )


def glm4moe(file: GgufFile, metadata: Metadata) -> GgufModel:
    """GLM-4.5 to 4.7, whose files count the layer that drafts tokens as one of the model."""
    _require_sigmoid(file, metadata)
    drafts = metadata.count("nextn_predict_layers", 0)
    return describe(
        file,
        metadata,
        "Glm4MoeForCausalLM",
        names.second_norm_names(),
        num_hidden_layers=metadata.size("block_count") - drafts,
        num_nextn_predict_layers=drafts,
        attention_bias=file.has_tensor("blk.0.attn_q.bias"),
        use_qk_norm=file.has_tensor("blk.0.attn_q_norm.weight"),
        n_shared_experts=metadata.size("expert_shared_count", 1),
        **_routed_experts(metadata),
        **_sigmoid_routing(metadata),
    )


def deepseek2(file: GgufFile, metadata: Metadata) -> GgufModel:
    """DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash. Newer files count one KV head, whose keys and
    values are latent values, and have the sizes of the heads under names of their own."""
    rope_dim = metadata.size("rope.dimension_count")
    is_sigmoid = metadata.count("expert_gating_func", _SOFTMAX) == _SIGMOID
    key_dim = metadata.size("attention.key_length_mla", metadata.size("attention.key_length"))
    value_dim = metadata.size("attention.value_length_mla", metadata.size("attention.value_length"))
    drafts = metadata.count("nextn_predict_layers", 0)
    query_latent = "attention.q_lora_rank"
    routing = _sigmoid_routing(metadata) if is_sigmoid else _softmax_routing(metadata)
    return describe(
        file,
        metadata,
        "DeepseekV3ForCausalLM" if is_sigmoid else "DeepseekV2ForCausalLM",
        names.latent_names(),
        head_dim=rope_dim,
        num_hidden_layers=metadata.size("block_count") - drafts,
        num_nextn_predict_layers=drafts,
        num_key_value_heads=metadata.size("attention.head_count"),
        kv_lora_rank=metadata.size("attention.kv_lora_rank"),
        q_lora_rank=metadata.size(query_latent) if metadata.has(query_latent) else None,
        qk_rope_head_dim=rope_dim,
        qk_nope_head_dim=key_dim - rope_dim,
        v_head_dim=value_dim,
        n_shared_experts=metadata.size("expert_shared_count"),
        rope_scaling=_latent_scaling(file, metadata),
        **_routed_experts(metadata),
        **routing,
    )


def _latent_scaling(file: GgufFile, metadata: Metadata) -> dict[str, Any] | None:
    """YaRN's, with what scores grow by: a tenth of `mscale_all_dim`, which in published models is
    `mscale` too."""
    scaling = rope_scaling(file, metadata)
    name = "rope.scaling.yarn_log_multiplier"
    if scaling is None or not metadata.has(name):
        return scaling
    mscale = 10 * metadata.number(name)
    return {**scaling, "mscale": mscale, "mscale_all_dim": mscale}


def minimax_m2(file: GgufFile, metadata: Metadata) -> GgufModel:
    _require_sigmoid(file, metadata)
    return describe(
        file,
        metadata,
        "MiniMaxM2ForCausalLM",
        names.pre_norm_names(),
        intermediate_size=metadata.size("expert_feed_forward_length"),
        num_local_experts=metadata.size("expert_count"),
        num_experts_per_tok=metadata.size("expert_used_count"),
    )


def gpt_oss(file: GgufFile, metadata: Metadata) -> GgufModel:
    """YaRN without rounding the borders of its ramp, which the metadata has no key for."""
    scaling = rope_scaling(file, metadata)
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling["truncate"] = False
    return describe(
        file,
        metadata,
        "GptOssForCausalLM",
        names.second_norm_names(),
        intermediate_size=metadata.size("expert_feed_forward_length"),
        num_local_experts=metadata.size("expert_count"),
        num_experts_per_tok=metadata.size("expert_used_count"),
        sliding_window=metadata.size("attention.sliding_window"),
        layer_types=layer_types_of(metadata),
        rope_scaling=scaling or {"rope_type": "default"},
    )


def _routed_experts(metadata: Metadata) -> dict[str, Any]:
    """Of models that share experts too."""
    return {
        "n_routed_experts": metadata.size("expert_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "first_k_dense_replace": metadata.count("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def _sigmoid_routing(metadata: Metadata) -> dict[str, Any]:
    return {
        "n_group": metadata.size("expert_group_count", 1),
        "topk_group": metadata.size("expert_group_used_count", 1),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
    }


def _softmax_routing(metadata: Metadata) -> dict[str, Any]:
    """Files of the large DeepSeek-V2 do not say that its experts are in groups."""
    return {
        "topk_method": "greedy",
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
    }


def _require_sigmoid(file: GgufFile, metadata: Metadata) -> None:
    """Raises ConfigError where experts are chosen in another way than by their sigmoids."""
    found = metadata.count("expert_gating_func", _SIGMOID)
    if found != _SIGMOID:
        raise ConfigError(
            f"{file.path}: metadata key '{metadata.architecture}.expert_gating_func' is {found}, "
            f"supported is {_SIGMOID} (sigmoid)"
        )
