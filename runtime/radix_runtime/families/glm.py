"""GLM-4 of 2024 and of 2025, dense; GLM-4.5 to 4.7, with experts."""

from collections.abc import Sequence

from ..specs import (
    GroupedRouter,
    HeadNorm,
    Layer,
    Mlp,
    ModelSpec,
    Moe,
    Norm,
    SharedExpert,
)
from .checks import require
from .family import Family
from .fused import gate_up_rules
from .keys import DecoderKeys, Size
from .names import Rename, Rule, drop_layers


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


class Glm4MoeKeys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of GLM-4.5 to 4.7."""

    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    attention_bias: bool = False
    use_qk_norm: bool = False
    n_routed_experts: Size
    n_shared_experts: Size = 1
    moe_intermediate_size: Size
    num_experts_per_tok: Size
    first_k_dense_replace: int = 1
    n_group: Size = 1
    topk_group: Size = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


def read_glm4_moe(keys: Glm4MoeKeys) -> ModelSpec:
    """The first layers are dense, the others have experts, of which one is shared."""
    require(keys.norm_topk_prob, "norm_topk_prob false is not supported")
    width = keys.moe_intermediate_size
    moe = Moe(
        num_experts=keys.n_routed_experts,
        width=width,
        router=GroupedRouter(
            top_k=keys.num_experts_per_tok,
            num_groups=keys.n_group,
            top_groups=keys.topk_group,
            scaling=keys.routed_scaling_factor,
        ),
        activation=keys.activation,
        shared=SharedExpert(
            mlp=Mlp(width=width * keys.n_shared_experts, activation=keys.activation)
        ),
    )
    qk_norm = HeadNorm(norm=keys.norm) if keys.use_qk_norm else None
    mixer = keys.gqa(qkv_bias=keys.attention_bias, qk_norm=qk_norm)
    return keys.model(
        Layer(
            mixer=mixer,
            feed_forward=keys.mlp if i < keys.first_k_dense_replace else moe,
            pre_norm=keys.norm,
        )
        for i in range(keys.num_hidden_layers)
    )


def glm4_moe_names(keys: Glm4MoeKeys) -> Sequence[Rule]:
    """Behind the last layer stands the one that predicts a second token; it is not run."""
    return (
        drop_layers(keys.num_hidden_layers, 1),
        Rename(r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
    )


GLM = Family(keys=GlmKeys, read=read_glm, names=gate_up_rules)
GLM4 = Family(keys=GlmKeys, read=read_glm4, names=gate_up_rules)
GLM4_MOE = Family(
    keys=Glm4MoeKeys,
    read=read_glm4_moe,
    names=glm4_moe_names,
    ignored=frozenset({"num_mtp_layers", "num_nextn_predict_layers"}),
)
