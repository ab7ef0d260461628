"""ModelConfig: a model's config.json, flattened, checked and in one spelling. Loads no torch."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from .errors import ConfigError
from .hub import read_json

_ORIGINAL_CONTEXT = "original_max_position_embeddings"
_ROPE_KEYS = {  # what each type of rope scaling must say
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL_CONTEXT, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _ORIGINAL_CONTEXT),
}
_ROPE_BASE = ("rope_theta", "partial_rotary_factor")  # may stand in the dictionary and beside it
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_ACTIVATIONS["gelu_new"] = "gelu_tanh"
_LAYER_TYPES = ("full_attention", "sliding_attention")
ARCHITECTURES = [f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")]
_FILE_NAMES = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}

_Size = Annotated[int, msgspec.Meta(gt=0)]


class _Common(msgspec.Struct, kw_only=True, frozen=True, rename=_FILE_NAMES):
    num_layers: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_heads: _Size
    vocab_size: _Size
    max_position_embeddings: _Size
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False


class _HFConfig(_Common, frozen=True):
    """The other keys of config.json that matter; types as the files have them."""

    architectures: list[str]
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: _Size | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: _Size | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    torch_dtype: str = "float32"
    dtype: str | None = None
    quantization_config: dict[str, Any] | None = None


class RopeConfig(NamedTuple):
    """`scaling`: None for the plain form, else transformers' keys, "rope_type" being linear, llama3
    or yarn."""

    theta: float
    rotary_dim: int
    scaling: dict[str, Any] | None = None


class ModelConfig(_Common, frozen=True):
    """What the runtime knows of a model. Sizes are those of the whole model, not of a rank.
    `layer_windows[i]`: number of tokens (itself included) that a token of layer i sees, None for
    all. `hidden_act` is silu, gelu or gelu_tanh; `dtype` the type the checkpoint names."""

    architecture: str
    num_kv_heads: int
    head_dim: int
    hidden_act: str
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    dtype: str

    @classmethod
    def from_dir(cls, path: str | Path, overrides: str = "{}") -> "ModelConfig":
        """config.json, merged with `overrides` (a JSON object; what both say of RoPE is merged
        too). Raises ConfigError, naming the key that is not supported."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ConfigError(f"{file} does not exist")
        try:
            changes = msgspec.json.decode(overrides, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"--json-model-override-args must be a JSON object: {error}"
            ) from None
        if unknown := sorted(set(changes) - set(_HFConfig.__struct_encode_fields__)):
            raise ConfigError(
                f"--json-model-override-args: {', '.join(unknown)} would change nothing"
            )
        raw = read_json(file)
        old, new = _rope_of(raw), _rope_of(changes)
        if new.get("rope_type", old.get("rope_type")) != old.get("rope_type"):
            old = {
                key: old[key] for key in _ROPE_BASE if key in old
            }  # another type brings its own numbers
        return cls.from_dict(raw | changes | {"rope_scaling": None, "rope_parameters": old | new})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        try:
            # null means "absent" except where it switches a default off
            given = {k: v for k, v in raw.items() if v is not None or k == "sliding_window"}
            hf = msgspec.convert(given, _HFConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"config.json: {error}") from None
        known = [*ARCHITECTURES, *(entry.name for entry in entry_points(group="radix.models"))]
        fits = len(hf.architectures) == 1 and hf.architectures[0] in known
        _require(
            fits, f"architecture {hf.architectures} is not supported; supported: {', '.join(known)}"
        )
        method = (hf.quantization_config or {}).get("quant_method", "unnamed")
        _require(
            hf.quantization_config is None, f"quantized checkpoints ({method}) are not supported"
        )
        kv_heads, head_dim = (
            hf.num_key_value_heads or hf.num_heads,
            hf.head_dim or hf.hidden_size // hf.num_heads,
        )
        divides = hf.num_heads % kv_heads == 0
        _require(
            divides,
            f"num_key_value_heads {kv_heads} must divide num_attention_heads {hf.num_heads}",
        )
        fits = head_dim % 16 == 0 and 16 <= head_dim <= 256
        _require(fits, f"head_dim {head_dim} is not a multiple of 16 up to 256")
        _require(hf.hidden_act in _ACTIVATIONS, f"hidden_act {hf.hidden_act!r} is not supported")
        dtype = hf.dtype or hf.torch_dtype
        _require(dtype in ("bfloat16", "float16", "float32"), f"dtype {dtype!r} is not supported")
        family = hf.architectures[0].removesuffix("ForCausalLM")
        bias = hf.attention_bias and family not in ("Mistral", "Qwen2")
        return cls(
            **{name: getattr(hf, name) for name in _Common.__struct_fields__},
            architecture=hf.architectures[0],
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_act=_ACTIVATIONS[hf.hidden_act],
            rope=_rope(_rope_of(given), hf, head_dim),
            qkv_bias=bias or family == "Qwen2",
            o_bias=bias,
            mlp_bias=hf.mlp_bias and family not in ("Mistral", "Qwen2", "Qwen3"),
            qk_norm=family == "Qwen3",
            layer_windows=_windows(hf, family),
            dtype=dtype,
        )

    @property
    def max_context(self) -> int:
        """Longest sequence in tokens that the positions of the model reach."""
        scaling = self.rope.scaling
        if scaling is None or scaling["rope_type"] != "yarn":
            return self.max_position_embeddings
        return max(
            self.max_position_embeddings, int(scaling["factor"] * scaling[_ORIGINAL_CONTEXT])
        )

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """They are split over the ranks, or repeated where there are fewer than ranks."""
        return max(1, self.num_kv_heads // tp_size)

    def check_tp(self, tp_size: int) -> None:
        """Raises ConfigError when the model cannot be split over `tp_size` ranks."""
        for name, value in (("attention heads", self.num_heads), ("MLP", self.intermediate_size)):
            if value % tp_size:
                raise ConfigError(f"--tp-size {tp_size} does not divide the {value} {name}")
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise ConfigError(f"--tp-size {tp_size} does not fit {self.num_kv_heads} KV heads")


def _require(condition: object, otherwise: str) -> None:
    if not condition:
        raise ConfigError(f"config.json: {otherwise}")


# What `raw` says of RoPE, in one dictionary: transformers 5 writes one, 4 `rope_theta` and
# `rope_scaling`.
def _rope_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in ("rope_parameters", "rope_scaling") if name in raw]
    given = next(filter(None, map(raw.get, names)), {"rope_type": "default"} if names else {})
    _require(isinstance(given, dict), "rope_parameters and rope_scaling must be objects")
    kind = {"rope_type": given["type"]} if "type" in given else {}
    beside = {key: raw[key] for key in _ROPE_BASE if key in raw}
    return beside | kind | {key: value for key, value in given.items() if key != "type"}


def _rope(said: Mapping[str, Any], hf: _HFConfig, head_dim: int) -> RopeConfig:
    given = {key: value for key, value in said.items() if value is not None}
    by_layer = any(isinstance(value, dict) for value in given.values())
    _require(not by_layer, "rope_parameters that differ by layer are not supported")
    kind, theta = given.pop("rope_type", "default"), given.pop("rope_theta", hf.rope_theta)
    _require(kind in _ROPE_KEYS, f"rope type {kind!r} is not supported")
    partial = given.pop("partial_rotary_factor", hf.partial_rotary_factor)
    inside = isinstance(partial, (int, float)) and 0 < partial <= 1
    _require(inside, f"partial_rotary_factor {partial!r} is not in (0, 1]")
    original = hf.original_max_position_embeddings or (
        hf.max_position_embeddings if kind == "yarn" else None
    )
    for key in _ROPE_KEYS[kind]:
        value: Any = given.setdefault(key, original if key == _ORIGINAL_CONTEXT else None)
        positive = type(value) in (int, float) and value > 0
        _require(positive, f"rope scaling {kind!r} needs a positive {key}, got {value!r}")
    return RopeConfig(
        float(theta),
        int(head_dim * partial),
        None if kind == "default" else given | {"rope_type": kind},
    )


# Llama: none. Mistral: on every layer. Others: if on, from `max_window_layers` up or where
# `layer_types` says.
def _windows(hf: _HFConfig, family: str) -> tuple[int | None, ...]:
    layers, window = hf.num_layers, hf.sliding_window
    if family == "Llama" or (family != "Mistral" and not hf.use_sliding_window) or window is None:
        return (None,) * layers
    if family == "Mistral":
        _require(hf.layer_types is None, "layer_types of a Mistral model are not supported")
        return (window,) * layers
    if hf.layer_types is None:
        return tuple(window if i >= hf.max_window_layers else None for i in range(layers))
    known = len(hf.layer_types) == layers and set(hf.layer_types) <= set(_LAYER_TYPES)
    _require(known, f"layer_types must be {layers} of {', '.join(_LAYER_TYPES)}")
    return tuple(window if t == "sliding_attention" else None for t in hf.layer_types)
