"""ModelConfig: a model's config.json, flattened, checked and in one spelling. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from .errors import ConfigError
from .hf import read_json

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DTYPES = ("bfloat16", "float16", "float32")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ARCHITECTURES = [f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")]

_Size = Annotated[int, msgspec.Meta(gt=0)]


class _HFConfig(msgspec.Struct):
    """The keys of config.json that matter; types as the files have them."""

    architectures: list[str]
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    vocab_size: _Size
    max_position_embeddings: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    sliding_window: _Size | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    quantization_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `scaling` is None for the plain form, else a dict whose "rope_type" is
    linear, llama3 or yarn, with transformers' keys."""

    theta: float
    rotary_dim: int
    scaling: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the runtime knows of a model. Sizes are those of the whole model, not of a rank.

    `layer_windows[i]`: number of tokens (itself included) that a token of layer i sees, None for
    all. `dtype` is the type the checkpoint names.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str  # silu, gelu or gelu_tanh
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    dtype: str

    @classmethod
    def from_dir(cls, path: str | Path, overrides: str = "{}") -> ModelConfig:
        """Reads config.json, merged with `overrides` (a JSON object). Raises ConfigError, naming
        the key, on anything not supported."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ConfigError(f"{file} does not exist")
        return cls.from_dict({**read_json(file), **_parse_overrides(overrides)})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        try:
            # null means "absent" except where it switches a default off
            given = {k: v for k, v in raw.items() if v is not None or k == "sliding_window"}
            hf = msgspec.convert(given, _HFConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"config.json: {error}") from None
        _check(hf)
        architecture = hf.architectures[0]
        head_dim = _head_dim(hf)
        bias = hf.attention_bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        return cls(
            architecture=architecture,
            num_layers=hf.num_hidden_layers,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
            head_dim=head_dim,
            vocab_size=hf.vocab_size,
            max_position_embeddings=hf.max_position_embeddings,
            rms_norm_eps=hf.rms_norm_eps,
            hidden_act=_ACTIVATIONS[hf.hidden_act],
            rope=_rope(hf, head_dim),
            tie_word_embeddings=hf.tie_word_embeddings,
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            o_bias=bias,
            mlp_bias=hf.mlp_bias and architecture == "LlamaForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
            layer_windows=_windows(hf),
            dtype=_dtype(hf),
        )

    @property
    def max_context(self) -> int:
        """Longest sequence in tokens that the positions of the model reach."""
        scaling = self.rope.scaling
        if scaling is None or scaling["rope_type"] != "yarn":
            return self.max_position_embeddings
        stretched = int(scaling["factor"] * scaling["original_max_position_embeddings"])
        return max(self.max_position_embeddings, stretched)

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """KV heads are split over the ranks, or repeated where there are fewer than ranks."""
        return max(1, self.num_kv_heads // tp_size)

    def check_tp(self, tp_size: int) -> None:
        """Raises ConfigError when the model cannot be split over `tp_size` ranks."""
        for name, value in (("attention heads", self.num_heads), ("MLP", self.intermediate_size)):
            if value % tp_size:
                raise ConfigError(f"--tp-size {tp_size} does not divide the {value} {name}")
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise ConfigError(f"--tp-size {tp_size} does not fit {self.num_kv_heads} KV heads")


def _parse_overrides(text: str) -> dict[str, Any]:
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--json-model-override-args is not JSON: {error}") from None
    if not isinstance(overrides, dict):
        raise ConfigError("--json-model-override-args must be a JSON object")
    return overrides


def _require(condition: object, otherwise: str) -> None:
    if not condition:
        raise ConfigError(f"config.json: {otherwise}")


def _check(hf: _HFConfig) -> None:
    """What no other function here looks at and the types do not say."""
    _require(
        len(hf.architectures) == 1 and hf.architectures[0] in _ARCHITECTURES,
        f"architecture {hf.architectures} is not supported; supported: {', '.join(_ARCHITECTURES)}",
    )
    if hf.quantization_config is not None:
        method = hf.quantization_config.get("quant_method", "unnamed")
        raise ConfigError(f"config.json: quantized checkpoints ({method}) are not supported")
    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
    _require(
        kv_heads is None or heads % kv_heads == 0,
        f"num_key_value_heads {kv_heads} must divide num_attention_heads {heads}",
    )
    _require(hf.hidden_act in _ACTIVATIONS, f"hidden_act {hf.hidden_act!r} is not supported")


def _head_dim(hf: _HFConfig) -> int:
    head_dim = hf.head_dim or hf.hidden_size // hf.num_attention_heads
    fits = head_dim % 16 == 0 and 16 <= head_dim <= 256
    _require(fits, f"head_dim {head_dim} is not a multiple of 16 up to 256")
    return head_dim


def _dtype(hf: _HFConfig) -> str:
    name = hf.dtype or hf.torch_dtype or "float32"
    _require(name in _DTYPES, f"dtype {name!r} is not supported")
    return name


def _rope(hf: _HFConfig, head_dim: int) -> RopeConfig:
    """transformers 5 writes `rope_parameters`, 4 `rope_theta` and `rope_scaling`."""
    scaling = {k: v for k, v in (hf.rope_parameters or hf.rope_scaling or {}).items() if v is not None}
    by_layer = any(isinstance(value, dict) for value in scaling.values())
    _require(not by_layer, "rope_parameters that differ by layer are not supported")
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    _require(kind in _ROPE_TYPES, f"rope type {kind!r} is not supported")
    theta = scaling.pop("rope_theta", None) or hf.rope_theta or 10000.0
    partial = scaling.pop("partial_rotary_factor", None) or hf.partial_rotary_factor or 1.0
    inside = isinstance(partial, (int, float)) and 0 < partial <= 1
    _require(inside, f"partial_rotary_factor {partial!r} is not in (0, 1]")
    rotary_dim = int(head_dim * partial)
    if kind == "default":
        return RopeConfig(float(theta), rotary_dim)
    scaling["rope_type"] = kind
    _check_scaling(hf, scaling)
    return RopeConfig(float(theta), rotary_dim, scaling)


def _check_scaling(hf: _HFConfig, scaling: dict[str, Any]) -> None:
    required = ["factor"]
    if scaling["rope_type"] in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", hf.max_position_embeddings)
        required.append("original_max_position_embeddings")
    if scaling["rope_type"] == "llama3":
        required += ["low_freq_factor", "high_freq_factor"]
    for key in required:
        value: Any = scaling.get(key)
        _require(
            type(value) in (int, float) and value > 0,
            f"rope scaling {scaling['rope_type']!r} needs a positive {key}, got {value!r}",
        )


def _windows(hf: _HFConfig) -> tuple[int | None, ...]:
    """Llama has no window; Mistral has one on every layer; Qwen has one where it is switched on,
    from layer `max_window_layers` up or where `layer_types` says so."""
    layers, window, architecture = hf.num_hidden_layers, hf.sliding_window, hf.architectures[0]
    if architecture.startswith("Qwen") and not hf.use_sliding_window:
        window = None
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * layers
    if architecture == "MistralForCausalLM":
        _require(hf.layer_types is None, "layer_types of a Mistral model are not supported")
        return (window,) * layers
    if hf.layer_types is None:
        return tuple(window if i >= hf.max_window_layers else None for i in range(layers))
    known = len(hf.layer_types) == layers and set(hf.layer_types) <= set(_LAYER_TYPES)
    _require(known, f"layer_types must be {layers} of {', '.join(_LAYER_TYPES)}")
    return tuple(window if t == "sliding_attention" else None for t in hf.layer_types)
