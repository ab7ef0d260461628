"""OLMo 2 and OLMo 3: norms after the blocks, queries and keys normed over all heads. OLMoE: norms
before the blocks, and experts."""

from collections.abc import Sequence
from typing import Any

from ..specs import AllHeadsNorm, Layer, ModelSpec, Moe, Rope, SoftmaxRouter
from .family import Family
from .keys import DecoderKeys, Size, windows_of_types
from .names import Rename, Rule


class Olmo2Keys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of OLMo 2."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


class Olmo3Keys(Olmo2Keys, kw_only=True, frozen=True):
    """config.json of OLMo 3. Scaling of RoPE is for the layers without a window."""

    sliding_window: Size | None = 4096
    layer_types: list[str] | None = None


class OlmoeKeys(Olmo2Keys, kw_only=True, frozen=True):
    """config.json of OLMoE. `intermediate_size` is the width of an expert."""

    num_experts: Size = 64
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = False


def read_olmo2(keys: Olmo2Keys) -> ModelSpec:
    """All layers are the same."""
    layer = _layer(keys, rope=keys.rope(), window=None)
    return keys.model([layer] * keys.num_hidden_layers)


def read_olmo3(keys: Olmo3Keys) -> ModelSpec:
    """Three layers with a window, then one without."""
    count = keys.num_hidden_layers
    types = keys.layer_types or [
        "sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(count)
    ]
    windows = windows_of_types(types, keys.sliding_window, count)
    ropes = keys.ropes_of_types({})
    return keys.model(
        _layer(keys, rope=ropes[kind], window=window)
        for kind, window in zip(types, windows, strict=True)
    )


def read_olmoe(keys: OlmoeKeys) -> ModelSpec:
    """Experts in every layer."""
    bias = keys.attention_bias
    moe = Moe(
        num_experts=keys.num_experts,
        width=keys.intermediate_size,
        router=SoftmaxRouter(top_k=keys.num_experts_per_tok, renormalize=keys.norm_topk_prob),
        activation=keys.activation,
    )
    layer = Layer(
        mixer=keys.gqa(qkv_bias=bias, o_bias=bias, qk_norm=AllHeadsNorm(norm=keys.norm)),
        feed_forward=moe,
        pre_norm=keys.norm,
    )
    return keys.model([layer] * keys.num_hidden_layers)


def _layer(keys: Olmo2Keys, *, rope: Rope, window: int | None) -> Layer:
    bias = keys.attention_bias
    return Layer(
        mixer=keys.gqa(
            rope=rope,
            window=window,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=AllHeadsNorm(norm=keys.norm),
        ),
        feed_forward=keys.mlp,
        pre_norm=None,
        post_norm=keys.norm,
    )


def names(keys: Any) -> Sequence[Rule]:
    """Of OLMo 2 and 3: both norms of a layer are of a block's output."""
    return (
        Rename(r"\.post_attention_layernorm\.", ".post_self_attn_layernorm."),
        Rename(r"\.post_feedforward_layernorm\.", ".post_mlp_layernorm."),
    )


OLMO2 = Family(keys=Olmo2Keys, read=read_olmo2, names=names)
OLMO3 = Family(keys=Olmo3Keys, read=read_olmo3, names=names)
OLMOE = Family(keys=OlmoeKeys, read=read_olmoe)
