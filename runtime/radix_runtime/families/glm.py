"""GLM-4 of 2024 and of 2025, dense."""

from ..specs import Layer, ModelSpec, Norm
from .family import Family
from .fused import gate_up_rules
from .keys import DecoderKeys, Size


class GlmKeys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of GLM-4."""

    head_dim: Size | None = 128
    rms_norm_eps: float = 1.5625e-7
    partial_rotary_factor: float = 0.5
    attention_bias: bool = True


def read_glm(keys: GlmKeys) -> ModelSpec:
    """Glm: RoPE on half of each head, its pairs side by side."""
    return _model(keys, post_norm=None)


def read_glm4(keys: GlmKeys) -> ModelSpec:
    """Glm4 has norms after its blocks too."""
    return _model(keys, post_norm=keys.norm)


def _model(keys: GlmKeys, post_norm: Norm | None) -> ModelSpec:
    layer = Layer(
        mixer=keys.gqa(rope=keys.rope(interleaved=True), qkv_bias=keys.attention_bias),
        feed_forward=keys.mlp,
        pre_norm=keys.norm,
        post_norm=post_norm,
    )
    return keys.model([layer] * keys.num_hidden_layers)


GLM = Family(keys=GlmKeys, read=read_glm, names=gate_up_rules)
GLM4 = Family(keys=GlmKeys, read=read_glm4, names=gate_up_rules)
