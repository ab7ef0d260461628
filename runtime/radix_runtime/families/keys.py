"""DecoderKeys: the keys of config.json that most families share, and checks of their values."""

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from ..specs import Gqa, Layer, Mlp, ModelSpec, RmsNorm, Rope
from .checks import require
from .rope import reach, read_rope

Size = Annotated[int, msgspec.Meta(gt=0)]

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DTYPES = ("bfloat16", "float16", "float32")


class DecoderKeys(msgspec.Struct, kw_only=True, frozen=True):
    """Keys with the names and types that files have. A family's own keys, and its own defaults, are
    fields of a subclass. A null stands for an absent key unless the field's type takes None.

    RoPE's settings, which files write in several ways, come in `rope_parameters` as
    `rope.rope_settings` gives them."""

    num_hidden_layers: Size
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    vocab_size: Size
    max_position_embeddings: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: Size | None = None
    torch_dtype: str = "float32"
    dtype: str | None = None

    @property
    def kv_heads(self) -> int:
        """The KV heads. Raises ConfigError where they do not divide the query heads."""
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        require(
            self.num_attention_heads % kv_heads == 0,
            f"num_key_value_heads {kv_heads} must divide num_attention_heads "
            f"{self.num_attention_heads}",
        )
        return kv_heads

    @property
    def head_size(self) -> int:
        """The elements of a head. Raises ConfigError where no kernel takes them."""
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        is_supported = head_dim % 16 == 0 and 16 <= head_dim <= 256
        require(is_supported, f"head_dim {head_dim} is not a multiple of 16 up to 256")
        return head_dim

    @property
    def activation(self) -> str:
        """The gated activation, as `Mlp.activation`. Raises ConfigError."""
        return activation_named(self.hidden_act)

    @property
    def model_dtype(self) -> str:
        """The type that the checkpoint names. Raises ConfigError for one that no model has."""
        dtype = self.dtype or self.torch_dtype
        require(dtype in _DTYPES, f"dtype {dtype!r} is not supported")
        return dtype

    @property
    def norm(self) -> RmsNorm:
        """The norm of most families."""
        return RmsNorm(eps=self.rms_norm_eps)

    @property
    def mlp(self) -> Mlp:
        """The feed-forward of most dense families."""
        return Mlp(width=self.intermediate_size, activation=self.activation)

    def gqa(self, **others: Any) -> Gqa:
        """The attention of most families: RoPE by `rope()`, scores divided by the root of the head
        size; `others` are fields that differ. Raises ConfigError."""
        fields: dict[str, Any] = {
            "num_heads": self.num_attention_heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_size,
            "scale": self.head_size**-0.5,
        }
        if "rope" not in others:
            fields["rope"] = self.rope()
        return Gqa(**fields | others)

    def model(self, layers: Iterable[Layer], **others: Any) -> ModelSpec:
        """The model of these layers; `others` are fields that differ from those of most families.
        Raises ConfigError."""
        built = tuple(layers)
        ropes = [layer.mixer.rope for layer in built if layer.mixer.rope is not None]
        positions = self.max_position_embeddings
        fields: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "max_context": max((reach(rope, positions) for rope in ropes), default=positions),
            "dtype": self.model_dtype,
            "tied_head": self.tie_word_embeddings,
            "final_norm": self.norm,
        }
        return ModelSpec(layers=built, **fields | others)

    def ropes_of_types(self, local: dict[str, Any]) -> dict[str, Rope]:
        """RoPE by the type of the layer, where `rope_parameters` has settings for each type. Else
        they are those of full attention, and a layer with a window has plain RoPE by them with
        `local` instead. Raises ConfigError."""
        given = self.rope_parameters or {}
        full = given.get("full_attention")
        sliding = given.get("sliding_attention")
        shared = {key: given[key] for key in ("rope_theta",) if key in given}
        if full is None:
            full = {key: value for key, value in given.items() if key != "sliding_attention"}
        if sliding is None:
            sliding = {**shared, **local}
        return {
            "full_attention": self.rope({**shared, **full}),
            "sliding_attention": self.rope({**shared, **sliding}),
        }

    def rope(self, settings: dict[str, Any] | None = None, *, interleaved: bool = False) -> Rope:
        """RoPE by `settings`, or by `rope_parameters`. Raises ConfigError."""
        return read_rope(
            self.rope_parameters if settings is None else settings,
            theta=self.rope_theta,
            partial=self.partial_rotary_factor,
            head_dim=self.head_size,
            max_positions=self.max_position_embeddings,
            original_context=self.original_max_position_embeddings,
            interleaved=interleaved,
        )


def activation_named(name: str) -> str:
    """A gated activation, as `Mlp.activation`, by its name in files. Raises ConfigError."""
    require(name in _ACTIVATIONS, f"hidden_act {name!r} is not supported")
    return _ACTIVATIONS[name]


def windows_of_types(
    layer_types: list[str], window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    """The window of each layer by `layer_types`. Raises ConfigError for other types of layers."""
    known = {"full_attention", "sliding_attention"}
    is_valid = len(layer_types) == num_layers and set(layer_types) <= known
    require(is_valid, f"layer_types must be {num_layers} of {', '.join(sorted(known))}")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
