"""ModelConfig: a model's config.json, flattened, checked and in one spelling. Loads no torch."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from .errors import ConfigError
from .hub import read_json

ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]

_ORIGINAL_CONTEXT = "original_max_position_embeddings"
_ROPE_KEYS: dict[str, tuple[str, ...]] = {  # what each type of RoPE scaling must give
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL_CONTEXT, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _ORIGINAL_CONTEXT),
}
_ROPE_BASE = ("rope_theta", "partial_rotary_factor")  # in the RoPE dictionary or beside it
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DTYPES = ("bfloat16", "float16", "float32")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_FILE_NAMES = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}

T = TypeVar("T")
_Size = Annotated[int, msgspec.Meta(gt=0)]


class _Common(msgspec.Struct, kw_only=True, frozen=True, rename=_FILE_NAMES):
    """What config.json and ModelConfig both have, with the same meaning."""

    num_layers: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_heads: _Size
    vocab_size: _Size
    max_position_embeddings: _Size
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False


class _HFKind(msgspec.Struct, kw_only=True, frozen=True):
    """What config.json says of the kind of model: judged before sizes, whose names may differ."""

    architectures: list[str]
    quantization_config: dict[str, Any] | None = None


class _HFConfig(_Common, frozen=True):
    """The other keys of config.json that matter; types as the files have them."""

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


class RopeConfig(NamedTuple):
    """Rotary position embedding of the first `rotary_dim` elements of each head.

    `scaling`: None for the plain form, else transformers' keys, with "rope_type" one of linear,
    llama3 and yarn."""

    theta: float
    rotary_dim: int
    scaling: dict[str, Any] | None = None


class ModelConfig(_Common, frozen=True):
    """What the runtime knows of a model. Sizes are those of the whole model, not of one rank.

    `layer_windows[i]`: how many tokens (itself included) a token of layer i sees, None for all.
    `hidden_act` is silu, gelu or gelu_tanh. `dtype` is the type that the checkpoint names:
    bfloat16, float16 or float32."""

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
        """Reads config.json and merges `overrides`, a JSON object, into it; the RoPE settings of
        the two are merged key by key. Raises ConfigError, naming the key that is not supported."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ConfigError(_no_config(file))
        changes = _parse_overrides(overrides)
        raw = read_json(file)
        old = _rope_settings(raw)
        new = _rope_settings(changes)
        if new.get("rope_type", old.get("rope_type")) != old.get("rope_type"):
            # Another type of scaling brings its own numbers.
            old = {key: old[key] for key in _ROPE_BASE if key in old}
        return cls.from_dict(raw | changes | {"rope_scaling": None, "rope_parameters": old | new})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """From the keys of a config.json. Raises ConfigError, naming the key that is missing, has
        the wrong type or is not supported."""
        # null means "absent" except where it switches a default off.
        given = {k: v for k, v in raw.items() if v is not None or k == "sliding_window"}
        architecture = _architecture(given)
        hf = _convert(given, _HFConfig)
        family = architecture.removesuffix("ForCausalLM")
        bias = hf.attention_bias and family not in ("Mistral", "Qwen2")
        head_dim = _head_dim(hf)
        common = {name: getattr(hf, name) for name in _Common.__struct_fields__}
        return cls(
            **common,
            architecture=architecture,
            num_kv_heads=_kv_heads(hf),
            head_dim=head_dim,
            hidden_act=_activation(hf),
            rope=_rope(_rope_settings(given), hf, head_dim),
            qkv_bias=bias or family == "Qwen2",
            o_bias=bias,
            mlp_bias=hf.mlp_bias and family not in ("Mistral", "Qwen2", "Qwen3"),
            qk_norm=family == "Qwen3",
            layer_windows=_windows(hf, family),
            dtype=_dtype(hf),
        )

    @property
    def max_context(self) -> int:
        """The longest sequence, in tokens, that the positions of the model reach."""
        scaling = self.rope.scaling
        if scaling is None or scaling["rope_type"] != "yarn":
            return self.max_position_embeddings
        stretched = int(scaling["factor"] * scaling[_ORIGINAL_CONTEXT])
        return max(self.max_position_embeddings, stretched)

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """KV heads are split over the ranks, or repeated where there are fewer heads than ranks."""
        return max(1, self.num_kv_heads // tp_size)

    def check_tp(self, tp_size: int) -> None:
        """Raises ConfigError when the model cannot be split over `tp_size` ranks."""
        for name, value in (("attention heads", self.num_heads), ("MLP", self.intermediate_size)):
            if value % tp_size:
                raise ConfigError(f"--tp-size {tp_size} does not divide the {value} {name}")
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise ConfigError(f"--tp-size {tp_size} does not fit {self.num_kv_heads} KV heads")


def _no_config(file: Path) -> str:
    folder = file.parent
    if any(folder.glob("*.gguf")):
        return f"{folder} holds GGUF files, a format that is not supported, and no {file.name}"
    return f"{file} does not exist"


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ConfigError(f"config.json: {otherwise}")


def _parse_overrides(overrides: str) -> dict[str, Any]:
    flag = "--json-model-override-args"
    try:
        changes = msgspec.json.decode(overrides, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag} must be a JSON object: {error}") from None
    known = {*_HFKind.__struct_encode_fields__, *_HFConfig.__struct_encode_fields__}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise ConfigError(f"{flag}: {', '.join(unknown)} would change nothing")
    return changes


def _convert(raw: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {error}") from None


def _architecture(raw: Mapping[str, Any]) -> str:
    """The architecture of a checkpoint that can be served. Raises ConfigError."""
    kind = _convert(raw, _HFKind)
    known = ARCHITECTURES + [entry.name for entry in entry_points(group="radix.models")]
    supported = len(kind.architectures) == 1 and kind.architectures[0] in known
    names = ", ".join(known)
    _require(supported, f"architecture {kind.architectures} is not supported; supported: {names}")
    if kind.quantization_config is not None:
        method = kind.quantization_config.get("quant_method", "unnamed")
        raise ConfigError(f"config.json: quantized checkpoints ({method}) are not supported")
    return kind.architectures[0]


def _kv_heads(hf: _HFConfig) -> int:
    kv_heads = hf.num_key_value_heads or hf.num_heads
    _require(
        hf.num_heads % kv_heads == 0,
        f"num_key_value_heads {kv_heads} must divide num_attention_heads {hf.num_heads}",
    )
    return kv_heads


def _head_dim(hf: _HFConfig) -> int:
    head_dim = hf.head_dim or hf.hidden_size // hf.num_heads
    supported = head_dim % 16 == 0 and 16 <= head_dim <= 256
    _require(supported, f"head_dim {head_dim} is not a multiple of 16 up to 256")
    return head_dim


def _activation(hf: _HFConfig) -> str:
    _require(hf.hidden_act in _ACTIVATIONS, f"hidden_act {hf.hidden_act!r} is not supported")
    return _ACTIVATIONS[hf.hidden_act]


def _dtype(hf: _HFConfig) -> str:
    dtype = hf.dtype or hf.torch_dtype
    _require(dtype in _DTYPES, f"dtype {dtype!r} is not supported")
    return dtype


def _rope_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What `raw` says of RoPE, in one dictionary with transformers 5's names.

    transformers 5 writes `rope_parameters`, transformers 4 `rope_theta` and `rope_scaling`, whose
    type may be called "type". A key that is there and empty asks for plain RoPE."""
    beside = {key: raw[key] for key in _ROPE_BASE if key in raw}
    if raw.get("rope_parameters"):
        given = raw["rope_parameters"]
    elif raw.get("rope_scaling"):
        given = raw["rope_scaling"]
    elif "rope_parameters" in raw or "rope_scaling" in raw:
        return beside | {"rope_type": "default"}
    else:
        return beside
    _require(isinstance(given, dict), "rope_parameters and rope_scaling must be objects")
    settings = beside | given
    kind = settings.pop("type", None)
    if kind is not None:
        settings.setdefault("rope_type", kind)
    return settings


def _rope(settings: Mapping[str, Any], hf: _HFConfig, head_dim: int) -> RopeConfig:
    given = {key: value for key, value in settings.items() if value is not None}
    by_layer = any(isinstance(value, dict) for value in given.values())
    _require(not by_layer, "rope_parameters that differ by layer are not supported")
    kind = given.pop("rope_type", "default")
    theta = given.pop("rope_theta", hf.rope_theta)
    partial = given.pop("partial_rotary_factor", hf.partial_rotary_factor)
    _require(kind in _ROPE_KEYS, f"rope type {kind!r} is not supported")
    inside = isinstance(partial, (int, float)) and 0 < partial <= 1
    _require(inside, f"partial_rotary_factor {partial!r} is not in (0, 1]")
    original = hf.original_max_position_embeddings
    if original is None and kind == "yarn":
        original = hf.max_position_embeddings
    for key in _ROPE_KEYS[kind]:
        if key == _ORIGINAL_CONTEXT:
            given.setdefault(key, original)
        value: Any = given.get(key)
        positive = type(value) in (int, float) and value > 0  # a bool is no number
        _require(positive, f"rope scaling {kind!r} needs a positive {key}, got {value!r}")
    scaling = None if kind == "default" else given | {"rope_type": kind}
    return RopeConfig(theta=float(theta), rotary_dim=int(head_dim * partial), scaling=scaling)


def _windows(hf: _HFConfig, family: str) -> tuple[int | None, ...]:
    """Llama has no window. Mistral has one on every layer. The others have one where it is switched
    on: from layer `max_window_layers` up, or where `layer_types` says so."""
    layers = hf.num_layers
    window = hf.sliding_window
    if family == "Mistral":
        _require(
            hf.layer_types is None or window is None,
            "layer_types of a Mistral model are not supported",
        )
        return (window,) * layers
    if family == "Llama" or not hf.use_sliding_window or window is None:
        return (None,) * layers
    if hf.layer_types is None:
        return tuple(window if i >= hf.max_window_layers else None for i in range(layers))
    known = len(hf.layer_types) == layers and set(hf.layer_types) <= set(_LAYER_TYPES)
    _require(known, f"layer_types must be {layers} of {', '.join(_LAYER_TYPES)}")
    return tuple(window if t == "sliding_attention" else None for t in hf.layer_types)
