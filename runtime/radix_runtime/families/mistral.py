"""Mistral."""

from ..specs import Layer, ModelSpec
from .checks import require
from .family import Family
from .keys import DecoderKeys, Size


class MistralKeys(DecoderKeys, frozen=True):
    """config.json of Mistral. A null window: there is none."""

    sliding_window: Size | None = 4096
    layer_types: list[str] | None = None


def read(keys: MistralKeys) -> ModelSpec:
    """Every layer has the window."""
    require(
        keys.layer_types is None or keys.sliding_window is None,
        "layer_types of a Mistral model are not supported",
    )
    layer = Layer(
        mixer=keys.gqa(window=keys.sliding_window), feed_forward=keys.mlp, pre_norm=keys.norm
    )
    return keys.model([layer] * keys.num_hidden_layers)


MISTRAL = Family(keys=MistralKeys, read=read)
