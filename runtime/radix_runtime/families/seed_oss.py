"""Seed-OSS."""

from ..specs import Layer, Mlp, ModelSpec
from .family import Family
from .keys import DecoderKeys, Size


class SeedOssKeys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of Seed-OSS."""

    head_dim: Size | None = 128
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False


def read(keys: SeedOssKeys) -> ModelSpec:
    """Llama with biases."""
    layer = Layer(
        mixer=keys.gqa(qkv_bias=keys.attention_bias, o_bias=keys.attention_out_bias),
        feed_forward=Mlp(
            width=keys.intermediate_size, activation=keys.activation, bias=keys.mlp_bias
        ),
        pre_norm=keys.norm,
    )
    return keys.model([layer] * keys.num_hidden_layers)


SEED_OSS = Family(keys=SeedOssKeys, read=read, ignored=frozenset({"residual_dropout"}))
