"""GLM-4 of 2024 and of 2025, dense; GLM-4.5 to 4.7, with experts."""

from ..specs import HeadNorm, Layer, ModelSpec, Norm
from .family import Family
from .fused import gate_up_rules
from .keys import DecoderKeys, Size
from .routed import RoutedKeys, drafting_names


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


class Glm4MoeKeys(RoutedKeys, kw_only=True, frozen=True):
    """config.json of GLM-4.5 to 4.7."""

    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    attention_bias: bool = False
    use_qk_norm: bool = False
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True


def read_glm4_moe(keys: Glm4MoeKeys) -> ModelSpec:
    """The first layers are dense, the others have experts, of which one is shared."""
    moe = keys.moe(keys.grouped_sigmoids(is_normed=keys.norm_topk_prob))
    qk_norm = HeadNorm(norm=keys.norm) if keys.use_qk_norm else None
    mixer = keys.gqa(qkv_bias=keys.attention_bias, qk_norm=qk_norm)
    return keys.model(
        Layer(mixer=mixer, feed_forward=feed_forward, pre_norm=keys.norm)
        for feed_forward in keys.feed_forwards(moe)
    )


GLM = Family(keys=GlmKeys, read=read_glm, names=gate_up_rules)
GLM4 = Family(keys=GlmKeys, read=read_glm4, names=gate_up_rules)
GLM4_MOE = Family(
    keys=Glm4MoeKeys,
    read=read_glm4_moe,
    names=drafting_names,
    ignored=frozenset({"num_mtp_layers", "num_nextn_predict_layers"}),
)
