"""The architectures of GGUF files: which model each is, and what its metadata says beyond that of
all others."""

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from . import mixtures, names
from .header import GgufFile
from .keys import OF_IMAGES, GgufModel, Read, describe, layer_types_of, rope_scaling, vector
from .metadata import Metadata


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


def _qwen(model_class: str) -> Read:
    def read(file: GgufFile, metadata: Metadata) -> GgufModel:
        metadata.ignore(*OF_IMAGES)
        return describe(file, metadata, model_class, names.pre_norm_names())

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
        layer_types=layer_types_of(metadata),
    )


def _exaone4(file: GgufFile, metadata: Metadata) -> GgufModel:
    """With windows, and layers without positions, in the larger model only."""
    window = None
    layer_types = None
    if metadata.has("attention.sliding_window"):
        window = metadata.size("attention.sliding_window")
        layer_types = layer_types_of(metadata)
    return describe(
        file,
        metadata,
        "Exaone4ForCausalLM",
        names.post_norm_names(),
        sliding_window=window,
        layer_types=layer_types,
    )


def _glm4(file: GgufFile, metadata: Metadata) -> GgufModel:
    """GLM-4 of 2025."""
    bias = file.has_tensor("blk.0.attn_q.bias")
    rules = names.fused_post_norm_names()
    return describe(file, metadata, "Glm4ForCausalLM", rules, attention_bias=bias)


def _seed_oss(file: GgufFile, metadata: Metadata) -> GgufModel:
    return describe(
        file,
        metadata,
        "SeedOssForCausalLM",
        names.second_norm_names(),
        attention_bias=file.has_tensor("blk.0.attn_q.bias"),
        attention_out_bias=file.has_tensor("blk.0.attn_output.bias"),
    )


_ARCHITECTURES: Mapping[str, Read] = {  # by general.architecture
    "deepseek2": mixtures.deepseek2,
    "dots1": mixtures.dots1,
    "ernie4_5": _qwen("Ernie4_5ForCausalLM"),
    "exaone4": _exaone4,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4": _glm4,
    "glm4moe": mixtures.glm4moe,
    "gpt-oss": mixtures.gpt_oss,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "llama": _llama,
    "minimax-m2": mixtures.minimax_m2,
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "olmoe": mixtures.olmoe,
    "phi3": _phi3,
    "qwen2": _qwen("Qwen2ForCausalLM"),
    "qwen2moe": mixtures.qwen_moe("Qwen2MoeForCausalLM", renormalize=False),
    "qwen2vl": _qwen("Qwen2ForCausalLM"),
    "qwen3": _qwen("Qwen3ForCausalLM"),
    "qwen3moe": mixtures.qwen_moe("Qwen3MoeForCausalLM", renormalize=True),
    "qwen3vl": _qwen("Qwen3ForCausalLM"),
    "qwen3vlmoe": mixtures.qwen_moe("Qwen3MoeForCausalLM", renormalize=True),
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
}
