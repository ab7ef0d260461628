"""The architectures of GGUF files: which model each is, and what its metadata says beyond that of
all others."""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from . import names
from .header import GgufFile
from .keys import GgufModel, describe, rope_scaling, vector
from .metadata import Metadata

_Read = Callable[[GgufFile, Metadata], GgufModel]

_OF_IMAGES = ("rope.dimension_sections", "n_deepstack_layers")  # a token of text has one position
# llama.cpp's numbers in `expert_gating_func`.
_SOFTMAX = 1
_SIGMOID = 2


def read_model(file: GgufFile) -> GgufModel:
    """Raises ConfigError for an architecture that is not supported, and for a key or tensor that is
    missing or wrong."""
    parts = file.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ConfigError(
            f"{file.path} is one of {parts} parts of a model; join them with "
            "`llama-gguf-split --merge`"
        )
    metadata = Metadata(file)
    architecture = metadata.architecture
    if architecture not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ConfigError(
            f"{file.path}: architecture {architecture!r} is not supported; supported: {known}"
        )
    return _ARCHITECTURES[architecture](file, metadata)


def _llama(file: GgufFile, metadata: Metadata) -> GgufModel:
    """Llama, Mistral, and, with experts, Mixtral."""
    heads = metadata.size("attention.head_count")
    kv_heads = metadata.size("attention.head_count_kv", heads)
    rules = names.paired_names(heads=heads, kv_heads=kv_heads)
    experts = {}
    model_class = "LlamaForCausalLM"
    if metadata.number("expert_count", 0) > 0:
        model_class = "MixtralForCausalLM"
        experts = {
            "num_local_experts": metadata.size("expert_count"),
            "num_experts_per_tok": metadata.size("expert_used_count"),
        }
    metadata.ignore("expert_count", "expert_used_count")
    return describe(file, metadata, model_class, rules, **experts)


def _smollm3(file: GgufFile, metadata: Metadata) -> GgufModel:
    heads = metadata.size("attention.head_count")
    kv_heads = metadata.size("attention.head_count_kv", heads)
    rules = names.paired_names(heads=heads, kv_heads=kv_heads)
    return describe(file, metadata, "SmolLM3ForCausalLM", rules)


def _mistral3(file: GgufFile, metadata: Metadata) -> GgufModel:
    """Ministral 3, whose queries grow with their position, and Mistral Small 3 without that."""
    heads = metadata.size("attention.head_count")
    kv_heads = metadata.size("attention.head_count_kv", heads)
    others: dict[str, Any] = {}
    if metadata.has("attention.temperature_scale"):
        scaling = dict(rope_scaling(file, metadata) or {})
        scaling["llama_4_scaling_beta"] = metadata.number("attention.temperature_scale")
        scaling["mscale"] = 1.0
        scaling["mscale_all_dim"] = metadata.number("rope.scaling.yarn_log_multiplier", 1.0)
        others["rope_scaling"] = scaling
    rules = names.paired_names(heads=heads, kv_heads=kv_heads)
    return describe(file, metadata, "Ministral3ForCausalLM", rules, **others)


def _granite(file: GgufFile, metadata: Metadata) -> GgufModel:
    return _granite_model(file, metadata, "GraniteForCausalLM")


def _granite_moe(file: GgufFile, metadata: Metadata) -> GgufModel:
    return _granite_model(
        file,
        metadata,
        "GraniteMoeForCausalLM",
        num_local_experts=metadata.size("expert_count"),
        num_experts_per_tok=metadata.size("expert_used_count"),
    )


def _granite_model(
    file: GgufFile, metadata: Metadata, model_class: str, **experts: int
) -> GgufModel:
    heads = metadata.size("attention.head_count")
    head_dim = metadata.size("embedding_length") // heads
    kv_heads = metadata.size("attention.head_count_kv", heads)
    return describe(
        file,
        metadata,
        model_class,
        names.paired_names(heads=heads, kv_heads=kv_heads),
        embedding_multiplier=metadata.number("embedding_scale", 1.0),
        residual_multiplier=metadata.number("residual_scale", 1.0),
        logits_scaling=metadata.number("logit_scale", 1.0),
        attention_multiplier=metadata.number("attention.scale", head_dim**-0.5),
        **experts,
    )


def _qwen(model_class: str) -> _Read:
    def read(file: GgufFile, metadata: Metadata) -> GgufModel:
        metadata.ignore(*_OF_IMAGES)
        return describe(file, metadata, model_class, names.pre_norm_names())

    return read


def _qwen_moe(model_class: str, *, renormalize: bool) -> _Read:
    def read(file: GgufFile, metadata: Metadata) -> GgufModel:
        metadata.ignore(*_OF_IMAGES)
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


def _gemma(file: GgufFile, metadata: Metadata) -> GgufModel:
    return describe(file, metadata, "GemmaForCausalLM", names.shifted_names())


def _gemma2(file: GgufFile, metadata: Metadata) -> GgufModel:
    return describe(
        file,
        metadata,
        "Gemma2ForCausalLM",
        names.gemma_names(),
        sliding_window=metadata.size("attention.sliding_window"),
        attn_logit_softcapping=metadata.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=metadata.number("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=_query_scalar(metadata, layers_of_27b=46),
    )


def _gemma3(file: GgufFile, metadata: Metadata) -> GgufModel:
    others: dict[str, Any] = {}
    if metadata.has("final_logit_softcapping"):
        others["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    return describe(
        file,
        metadata,
        "Gemma3ForCausalLM",
        names.gemma_names(),
        sliding_window=metadata.size("attention.sliding_window"),
        rope_local_base_freq=metadata.number("rope.freq_base_swa", 10000.0),
        query_pre_attn_scalar=_query_scalar(metadata, layers_of_27b=62),
        **others,
    )


def _query_scalar(metadata: Metadata, *, layers_of_27b: int) -> int:
    """What queries are divided by the root of, which files do not say: the size of a head, and in
    the largest model of a generation the embedding's share of one."""
    heads = metadata.size("attention.head_count")
    share = metadata.size("embedding_length") // heads
    if metadata.size("block_count") == layers_of_27b:
        return share
    return metadata.size("attention.key_length", share)


def _phi3(file: GgufFile, metadata: Metadata) -> GgufModel:
    others: dict[str, Any] = {}
    if "rope_factors_long.weight" in file.tensors:
        original = metadata.size("rope.scaling.original_context_length")
        others["original_max_position_embeddings"] = original
        others["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": vector(file, "rope_factors_short.weight"),
            "long_factor": vector(file, "rope_factors_long.weight"),
            "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original,
        }
    if metadata.has("attention.sliding_window"):
        others["sliding_window"] = metadata.size("attention.sliding_window")
    return describe(file, metadata, "Phi3ForCausalLM", names.fused_names(), **others)


def _olmo2(file: GgufFile, metadata: Metadata) -> GgufModel:
    """OLMo 2, and OLMo 3, which has windows."""
    rules = names.post_norm_names()
    if not metadata.has("attention.sliding_window"):
        return describe(file, metadata, "Olmo2ForCausalLM", rules)
    return describe(
        file,
        metadata,
        "Olmo3ForCausalLM",
        rules,
        sliding_window=metadata.size("attention.sliding_window"),
        layer_types=_layer_types(metadata),
    )


def _olmoe(file: GgufFile, metadata: Metadata) -> GgufModel:
    return describe(
        file,
        metadata,
        "OlmoeForCausalLM",
        names.pre_norm_names(),
        num_experts=metadata.size("expert_count"),
        num_experts_per_tok=metadata.size("expert_used_count"),
    )


def _exaone4(file: GgufFile, metadata: Metadata) -> GgufModel:
    """With windows, and layers without positions, in the larger model only."""
    window = None
    layer_types = None
    if metadata.has("attention.sliding_window"):
        window = metadata.size("attention.sliding_window")
        layer_types = _layer_types(metadata)
    return describe(
        file,
        metadata,
        "Exaone4ForCausalLM",
        names.post_norm_names(),
        sliding_window=window,
        layer_types=layer_types,
    )


def _layer_types(metadata: Metadata) -> list[str] | None:
    """Which layers have the window; None where the file leaves it to the architecture."""
    name = "attention.sliding_window_pattern"
    if not metadata.has(name):
        return None
    has_window = metadata.flags(name, metadata.size("block_count"))
    return ["sliding_attention" if each else "full_attention" for each in has_window]


def _glm4(file: GgufFile, metadata: Metadata) -> GgufModel:
    """GLM-4 of 2025."""
    bias = file.has_tensor("blk.0.attn_q.bias")
    rules = names.fused_post_norm_names()
    return describe(file, metadata, "Glm4ForCausalLM", rules, attention_bias=bias)


def _dots1(file: GgufFile, metadata: Metadata) -> GgufModel:
    """dots.llm1, whose files do not say that some layers have a window: no published model's do."""
    _require_sigmoid(file, metadata)
    return describe(
        file,
        metadata,
        "Dots1ForCausalLM",
        names.pre_norm_names(),
        max_window_layers=metadata.size("block_count"),
        attention_bias=file.has_tensor("blk.0.attn_q.bias"),
        n_routed_experts=metadata.size("expert_count"),
        n_shared_experts=metadata.size("expert_shared_count", 1),
        moe_intermediate_size=metadata.size("expert_feed_forward_length"),
        num_experts_per_tok=metadata.size("expert_used_count"),
        first_k_dense_replace=metadata.count("leading_dense_block_count", 0),
        routed_scaling_factor=metadata.number("expert_weights_scale", 1.0),
        **_sigmoid_routing(metadata),
    )


def _glm4moe(file: GgufFile, metadata: Metadata) -> GgufModel:
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
        n_routed_experts=metadata.size("expert_count"),
        n_shared_experts=metadata.size("expert_shared_count", 1),
        moe_intermediate_size=metadata.size("expert_feed_forward_length"),
        num_experts_per_tok=metadata.size("expert_used_count"),
        first_k_dense_replace=metadata.count("leading_dense_block_count", 0),
        routed_scaling_factor=metadata.number("expert_weights_scale", 1.0),
        **_sigmoid_routing(metadata),
    )


def _deepseek2(file: GgufFile, metadata: Metadata) -> GgufModel:
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
        n_routed_experts=metadata.size("expert_count"),
        n_shared_experts=metadata.size("expert_shared_count"),
        moe_intermediate_size=metadata.size("expert_feed_forward_length"),
        num_experts_per_tok=metadata.size("expert_used_count"),
        first_k_dense_replace=metadata.count("leading_dense_block_count", 0),
        routed_scaling_factor=metadata.number("expert_weights_scale", 1.0),
        rope_scaling=_latent_scaling(file, metadata),
        **routing,
    )


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


def _latent_scaling(file: GgufFile, metadata: Metadata) -> dict[str, Any] | None:
    """YaRN's, with what scores grow by: a tenth of `mscale_all_dim`, which in published models is
    `mscale` too."""
    scaling = rope_scaling(file, metadata)
    name = "rope.scaling.yarn_log_multiplier"
    if scaling is None or not metadata.has(name):
        return scaling
    mscale = 10 * metadata.number(name)
    return {**scaling, "mscale": mscale, "mscale_all_dim": mscale}


def _minimax_m2(file: GgufFile, metadata: Metadata) -> GgufModel:
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


def _seed_oss(file: GgufFile, metadata: Metadata) -> GgufModel:
    return describe(
        file,
        metadata,
        "SeedOssForCausalLM",
        names.second_norm_names(),
        attention_bias=file.has_tensor("blk.0.attn_q.bias"),
        attention_out_bias=file.has_tensor("blk.0.attn_output.bias"),
    )


def _gpt_oss(file: GgufFile, metadata: Metadata) -> GgufModel:
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
        layer_types=_layer_types(metadata),
        rope_scaling=scaling or {"rope_type": "default"},
    )


def _require_sigmoid(file: GgufFile, metadata: Metadata) -> None:
    """Raises ConfigError where experts are chosen in another way than by their sigmoids."""
    found = metadata.count("expert_gating_func", _SIGMOID)
    if found != _SIGMOID:
        raise ConfigError(
            f"{file.path}: metadata key '{metadata.architecture}.expert_gating_func' is {found}, "
            f"supported is {_SIGMOID} (sigmoid)"
        )


_ARCHITECTURES: Mapping[str, _Read] = {  # by general.architecture
    "deepseek2": _deepseek2,
    "dots1": _dots1,
    "ernie4_5": _qwen("Ernie4_5ForCausalLM"),
    "exaone4": _exaone4,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4": _glm4,
    "glm4moe": _glm4moe,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "llama": _llama,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "qwen2": _qwen("Qwen2ForCausalLM"),
    "qwen2moe": _qwen_moe("Qwen2MoeForCausalLM", renormalize=False),
    "qwen2vl": _qwen("Qwen2ForCausalLM"),
    "qwen3": _qwen("Qwen3ForCausalLM"),
    "qwen3moe": _qwen_moe("Qwen3MoeForCausalLM", renormalize=True),
    "qwen3vl": _qwen("Qwen3ForCausalLM"),
    "qwen3vlmoe": _qwen_moe("Qwen3MoeForCausalLM", renormalize=True),
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
}
