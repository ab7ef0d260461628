"""ERNIE 4.5, dense."""

from ..specs import Layer, Mlp, ModelSpec
from .family import Family
from .keys import DecoderKeys, Size


class ErnieKeys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of ERNIE 4.5."""

    head_dim: Size | None = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 5e5
    tie_word_embeddings: bool = True
    use_bias: bool = False


def read(keys: ErnieKeys) -> ModelSpec:
    """Llama with the pairs of RoPE side by side; all products have biases, or none."""
    bias = keys.use_bias
    layer = Layer(
        mixer=keys.gqa(rope=keys.rope(interleaved=True), qkv_bias=bias, o_bias=bias),
        feed_forward=Mlp(width=keys.intermediate_size, activation=keys.activation, bias=bias),
        pre_norm=keys.norm,
    )
    return keys.model([layer] * keys.num_hidden_layers)


ERNIE = Family(keys=ErnieKeys, read=read)
