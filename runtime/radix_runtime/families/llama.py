"""Llama, and what a model class of another package gets that comes without a family."""

from ..specs import Layer, Mlp, ModelSpec
from .family import Family
from .keys import DecoderKeys, Size, windows_of_types


class LlamaKeys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of Llama."""

    attention_bias: bool = False
    mlp_bias: bool = False


class GenericKeys(LlamaKeys, kw_only=True, frozen=True):
    """config.json of an unknown architecture: Llama's keys, and a window where it is switched on by
    `use_sliding_window`, on the layers that `layer_types` names."""

    sliding_window: Size | None = None
    use_sliding_window: bool = False
    layer_types: list[str] | None = None


def read(keys: LlamaKeys) -> ModelSpec:
    """Llama: every layer is the same."""
    return _model(keys, windows=(None,) * keys.num_hidden_layers)


def read_generic(keys: GenericKeys) -> ModelSpec:
    """Llama with windows."""
    window = keys.sliding_window if keys.use_sliding_window else None
    types = keys.layer_types or ["sliding_attention"] * keys.num_hidden_layers
    return _model(keys, windows=windows_of_types(types, window, keys.num_hidden_layers))


def _model(keys: LlamaKeys, windows: tuple[int | None, ...]) -> ModelSpec:
    mlp = Mlp(width=keys.intermediate_size, activation=keys.activation, bias=keys.mlp_bias)
    rope = keys.rope()
    bias = keys.attention_bias
    return keys.model(
        Layer(
            mixer=keys.gqa(rope=rope, qkv_bias=bias, o_bias=bias, window=window),
            feed_forward=mlp,
            pre_norm=keys.norm,
        )
        for window in windows
    )


LLAMA = Family(keys=LlamaKeys, read=read, ignored=frozenset({"sliding_window", "layer_types"}))
GENERIC = Family(keys=GenericKeys, read=read_generic)
