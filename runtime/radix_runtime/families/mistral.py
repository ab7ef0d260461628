"""Mistral, Ministral and the text of Mistral Small 3."""

from ..specs import Layer, ModelSpec, PositionScale
from .checks import require
from .family import Family
from .keys import DecoderKeys, Size, windows_of_types
from .multimodal import text_rules


class MistralKeys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of Mistral. A null window: there is none."""

    sliding_window: Size | None = 4096
    layer_types: list[str] | None = None


class Ministral3Keys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of Ministral 3."""

    head_dim: Size | None = 128
    rms_norm_eps: float = 1e-5
    sliding_window: Size | None = None


def read_mistral(keys: MistralKeys) -> ModelSpec:
    """Every layer has the window."""
    require(
        keys.layer_types is None or keys.sliding_window is None,
        "layer_types of a Mistral model are not supported",
    )
    layer = Layer(
        mixer=keys.gqa(window=keys.sliding_window), feed_forward=keys.mlp, pre_norm=keys.norm
    )
    return keys.model([layer] * keys.num_hidden_layers)


def read_ministral(keys: MistralKeys) -> ModelSpec:
    """`layer_types` says which layers have the window; without it all of them."""
    count = keys.num_hidden_layers
    types = keys.layer_types or ["sliding_attention"] * count
    rope = keys.rope()
    return keys.model(
        Layer(mixer=keys.gqa(rope=rope, window=window), feed_forward=keys.mlp, pre_norm=keys.norm)
        for window in windows_of_types(types, keys.sliding_window, count)
    )


def read_ministral3(keys: Ministral3Keys) -> ModelSpec:
    """Queries grow with their position, as Llama 4's do, where `rope_parameters` says so."""
    settings = dict(keys.rope_parameters or {})
    settings.pop("max_position_embeddings", None)
    beta = settings.pop("llama_4_scaling_beta", None)
    rope = keys.rope(settings)
    position_scale = None
    if beta is not None:
        original = settings.get("original_max_position_embeddings")
        require(
            isinstance(original, int) and original > 0,
            "llama_4_scaling_beta needs original_max_position_embeddings",
        )
        position_scale = PositionScale(beta=float(beta), period=int(original or 0))
    layer = Layer(
        mixer=keys.gqa(rope=rope, window=keys.sliding_window, position_scale=position_scale),
        feed_forward=keys.mlp,
        pre_norm=keys.norm,
    )
    return keys.model([layer] * keys.num_hidden_layers)


MISTRAL = Family(keys=MistralKeys, read=read_mistral)
MINISTRAL = Family(keys=MistralKeys, read=read_ministral)
MINISTRAL3 = Family(keys=Ministral3Keys, read=read_ministral3)
MISTRAL3 = Family(keys=Ministral3Keys, read=read_ministral3, names=text_rules)
