"""What the metadata of all GGUF files says of a model, under the names of a config.json of its
family."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..families.names import Rule
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
    "<EOT>", "_<EOT>", "<|end_of_text|>", "<end_of_utterance>", "<|return|>", "<|call|>",
})  # fmt: skip
# In models that have the former, the latter ends a message, and another may follow (gpt-oss).
_RETURN = "<|return|>"
_MESSAGE_END = "<|end|>"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_IGNORED = ("attention.value_length", "rope.scaling.finetuned", "tensor_data_layout", "vocab_size")
OF_IMAGES = ("rope.dimension_sections", "n_deepstack_layers")  # a token of text has one position
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


# How the files of an architecture are read. Raises ConfigError.
Read = Callable[[GgufFile, Metadata], GgufModel]


def describe(
    file: GgufFile,
    metadata: Metadata,
    model_class: str,
    rules: Sequence[Rule],
    *,
    head_dim: int | None = None,
    **others: Any,
) -> GgufModel:
    """What all architectures say, and `others`. `head_dim`: where it is another than that of keys
    and values. Raises ConfigError."""
    heads = metadata.size("attention.head_count")
    hidden = metadata.size("embedding_length")
    if head_dim is None:
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
        "rope_scaling": rope_scaling(file, metadata),
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


def rope_scaling(file: GgufFile, metadata: Metadata) -> dict[str, Any] | None:
    """How the frequencies of RoPE are scaled: by a tensor that divides each (Llama 3.1), or by a
    rule that the metadata names. Raises ConfigError."""
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
    factors = vector(file, name)
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def vector(file: GgufFile, name: str) -> list[float]:
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
        texts = _END_TEXTS
        if any(tokens[index] == _RETURN for index in special):
            texts = texts - {_MESSAGE_END}
        found += [index for index in special if tokens[index] in texts]
    return list(dict.fromkeys(index for index in found if isinstance(index, int)))


def layer_types_of(metadata: Metadata) -> list[str] | None:
    """Which layers have the window; None where the file leaves it to the architecture."""
    name = "attention.sliding_window_pattern"
    if not metadata.has(name):
        return None
    has_window = metadata.flags(name, metadata.size("block_count"))
    return ["sliding_attention" if each else "full_attention" for each in has_window]
