"""What a GGUF file's metadata says of the model, under the names of a config.json of its family."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..families.names import Rule
from . import names
from .header import GgufFile
from .metadata import Metadata
from .types import CODES

_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
_TOKENS = "tokenizer.ggml.tokens"
_LLAMA3_FACTORS = "rope_freqs.weight"
# Tokens that end a turn, as llama.cpp knows them by their texts: files name one of them at most.
_END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "<|end_of_text|>", "<end_of_utterance>",
})  # fmt: skip
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_IGNORED = ("attention.value_length", "rope.scaling.finetuned", "tensor_data_layout", "vocab_size")
_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """A model as its GGUF file describes it: `config` as a config.json would, and the `rules` that
    lead to the names of such a checkpoint's tensors."""

    config: Mapping[str, Any]
    rules: Sequence[Rule]


_Read = Callable[[GgufFile, Metadata], GgufModel]


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


def _describe(
    file: GgufFile, metadata: Metadata, model_class: str, rules: Sequence[Rule], **others: Any
) -> GgufModel:
    """What all architectures say, and `others`."""
    heads = metadata.size("attention.head_count")
    hidden = metadata.size("embedding_length")
    head_dim = metadata.size("attention.key_length", hidden // heads)
    if metadata.size("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{file.path}: values of another size than keys are not supported")
    rows = _vocabulary(file, hidden)
    config: dict[str, Any] = {
        "architectures": [model_class],
        "hidden_size": hidden,
        "num_hidden_layers": metadata.size("block_count"),
        "intermediate_size": metadata.size("feed_forward_length", hidden),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.size("context_length"),
        "vocab_size": rows,
        "tie_word_embeddings": _HEAD not in file.tensors,
        "dtype": _dtype(file),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": metadata.size("rope.dimension_count", head_dim) / head_dim,
        "rope_scaling": _rope_scaling(file, metadata),
        "eos_token_id": _end_ids(file),
        "quantization_config": _quantization(file),
        **others,
    }
    metadata.ignore(*_IGNORED)
    return GgufModel(config={**config, **metadata.unread()}, rules=rules)


def _vocabulary(file: GgufFile, hidden: int) -> int:
    """The rows of the embedding. Raises ConfigError where they are fewer than the tokens."""
    entry = file.tensors.get(_EMBEDDING)
    if entry is None:
        raise ConfigError(f"{file.path}: tensor {_EMBEDDING!r} is missing")
    if len(entry.shape) != 2 or entry.shape[1] != hidden:
        raise ConfigError(
            f"{file.path}: tensor {_EMBEDDING!r} has shape {list(entry.shape)}, expected "
            f"[tokens, {hidden}]"
        )
    tokens = file.metadata.get(_TOKENS, [])
    if len(tokens) > entry.shape[0]:
        raise ConfigError(
            f"{file.path}: the tokenizer has {len(tokens)} tokens, tensor {_EMBEDDING!r} "
            f"{entry.shape[0]} rows"
        )
    return entry.shape[0]


def _dtype(file: GgufFile) -> str:
    """The type of the matrices where all are of one float type, else bfloat16."""
    kinds = {entry.type.name for entry in file.tensors.values() if len(entry.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds == {"F16"} else "bfloat16"


def _quantization(file: GgufFile) -> dict[str, Any] | None:
    """The type of each tensor that holds codes, by its name without `.weight`."""
    types = {
        name.removesuffix(".weight"): entry.type.name
        for name, entry in file.tensors.items()
        if entry.type.name in CODES
    }
    return {"quant_method": "gguf", "types": types} if types else None


def _rope_scaling(file: GgufFile, metadata: Metadata) -> dict[str, Any] | None:
    """How the frequencies of RoPE are scaled: by a tensor that divides each (Llama 3.1), or by a
    rule that the metadata names."""
    if _LLAMA3_FACTORS in file.tensors:
        metadata.ignore("rope.scaling.type", "rope.scaling.factor")
        return _divided(file, _LLAMA3_FACTORS, metadata.size("context_length"))
    kind = metadata.text("rope.scaling.type")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    original = metadata.size("rope.scaling.original_context_length", 1)
    if kind == "yarn":
        scaling = metadata.given(_YARN)
        if original > 1:
            scaling["original_max_position_embeddings"] = original
        return {"rope_type": "yarn", "factor": factor, **scaling}
    if kind in (None, "linear") and factor != 1:
        return {"rope_type": "linear", "factor": factor}
    if kind in (None, "none", "linear"):
        return None
    raise ConfigError(f"{file.path}: rope scaling {kind!r} is not supported")


def _divided(file: GgufFile, name: str, context: int) -> dict[str, Any]:
    factors = _vector(file, name)
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _vector(file: GgufFile, name: str) -> list[float]:
    """The values of a small F32 tensor. Raises ConfigError where it is none."""
    entry = file.tensors.get(name)
    if entry is None:
        raise ConfigError(f"{file.path}: tensor {name!r} is missing")
    if entry.type.name != "F32" or len(entry.shape) != 1:
        raise ConfigError(f"{file.path}: tensor {name!r} is no vector of type F32")
    values: list[float] = file.blocks(entry).view(np.float32).tolist()
    return values


def _end_ids(file: GgufFile) -> list[int]:
    """Every token that ends an answer."""
    found = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    tokens = file.metadata.get(_TOKENS, [])
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if kinds is not None and len(kinds) == len(tokens):
        special = np.isin(kinds, (3, 4)).nonzero()[0].tolist()  # control and user-defined
        found += [index for index in special if tokens[index] in _END_TEXTS]
    return list(dict.fromkeys(index for index in found if isinstance(index, int)))


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
    return _describe(file, metadata, model_class, rules, **experts)


def _smollm3(file: GgufFile, metadata: Metadata) -> GgufModel:
    heads = metadata.size("attention.head_count")
    kv_heads = metadata.size("attention.head_count_kv", heads)
    rules = names.paired_names(heads=heads, kv_heads=kv_heads)
    return _describe(file, metadata, "SmolLM3ForCausalLM", rules)


def _granite(file: GgufFile, metadata: Metadata) -> GgufModel:
    heads = metadata.size("attention.head_count")
    head_dim = metadata.size("embedding_length") // heads
    kv_heads = metadata.size("attention.head_count_kv", heads)
    return _describe(
        file,
        metadata,
        "GraniteForCausalLM",
        names.paired_names(heads=heads, kv_heads=kv_heads),
        embedding_multiplier=metadata.number("embedding_scale", 1.0),
        residual_multiplier=metadata.number("residual_scale", 1.0),
        logits_scaling=metadata.number("logit_scale", 1.0),
        attention_multiplier=metadata.number("attention.scale", head_dim**-0.5),
    )


def _qwen(model_class: str) -> _Read:
    def read(file: GgufFile, metadata: Metadata) -> GgufModel:
        return _describe(file, metadata, model_class, names.pre_norm_names())

    return read


def _qwen_moe(model_class: str, *, renormalize: bool) -> _Read:
    def read(file: GgufFile, metadata: Metadata) -> GgufModel:
        experts: dict[str, Any] = {
            "num_experts": metadata.size("expert_count"),
            "num_experts_per_tok": metadata.size("expert_used_count"),
            "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
            "norm_topk_prob": renormalize,
        }
        shared = "expert_shared_feed_forward_length"
        if metadata.has(shared):
            experts["shared_expert_intermediate_size"] = metadata.size(shared)
        return _describe(file, metadata, model_class, names.pre_norm_names(), **experts)

    return read


def _gemma2(file: GgufFile, metadata: Metadata) -> GgufModel:
    return _describe(
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
    return _describe(
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
            "short_factor": _vector(file, "rope_factors_short.weight"),
            "long_factor": _vector(file, "rope_factors_long.weight"),
            "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original,
        }
    if metadata.has("attention.sliding_window"):
        others["sliding_window"] = metadata.size("attention.sliding_window")
    return _describe(file, metadata, "Phi3ForCausalLM", names.fused_names(), **others)


def _olmo2(file: GgufFile, metadata: Metadata) -> GgufModel:
    return _describe(file, metadata, "Olmo2ForCausalLM", names.post_norm_names())


_ARCHITECTURES: Mapping[str, _Read] = {  # by general.architecture
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "granite": _granite,
    "llama": _llama,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen("Qwen2ForCausalLM"),
    "qwen2moe": _qwen_moe("Qwen2MoeForCausalLM", renormalize=False),
    "qwen3": _qwen("Qwen3ForCausalLM"),
    "qwen3moe": _qwen_moe("Qwen3MoeForCausalLM", renormalize=True),
    "smollm3": _smollm3,
}
