"""Granite 3, dense."""

from ..specs import Layer, Mlp, ModelSpec
from .checks import require
from .family import Family
from .keys import DecoderKeys


class GraniteKeys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of Granite."""

    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0


def read(keys: GraniteKeys) -> ModelSpec:
    """Llama with multipliers."""
    require(keys.logits_scaling > 0, f"logits_scaling is {keys.logits_scaling}")
    bias = keys.attention_bias
    layer = Layer(
        mixer=keys.gqa(scale=keys.attention_multiplier, qkv_bias=bias, o_bias=bias),
        feed_forward=Mlp(
            width=keys.intermediate_size, activation=keys.activation, bias=keys.mlp_bias
        ),
        pre_norm=keys.norm,
        residual_multiplier=keys.residual_multiplier,
    )
    return keys.model(
        [layer] * keys.num_hidden_layers,
        embedding_multiplier=keys.embedding_multiplier,
        logit_multiplier=1 / keys.logits_scaling,
    )


GRANITE = Family(keys=GraniteKeys, read=read)
