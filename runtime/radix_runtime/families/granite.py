"""Granite 3, dense and with experts."""

from collections.abc import Sequence

from ..specs import FeedForward, Layer, Mlp, ModelSpec, Moe, SoftmaxRouter
from .checks import require
from .family import Family
from .keys import DecoderKeys, Size
from .names import Rename, Rule, SplitRows, Unstack


class GraniteKeys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of Granite. Only dense models have an `mlp_bias`."""

    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0


class GraniteMoeKeys(GraniteKeys, kw_only=True, frozen=True):
    """config.json of Granite with experts. `intermediate_size` is the width of one."""

    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2


def read(keys: GraniteKeys) -> ModelSpec:
    """Llama with multipliers."""
    mlp = Mlp(width=keys.intermediate_size, activation=keys.activation, bias=keys.mlp_bias)
    return _model(keys, mlp)


def read_moe(keys: GraniteMoeKeys) -> ModelSpec:
    """Experts in every layer; the weights of the chosen ones add up to 1."""
    require(not keys.mlp_bias, "mlp_bias true is not supported")
    moe = Moe(
        num_experts=keys.num_local_experts,
        width=keys.intermediate_size,
        router=SoftmaxRouter(top_k=keys.num_experts_per_tok, renormalize=True),
        activation=keys.activation,
    )
    return _model(keys, moe)


def _model(keys: GraniteKeys, feed_forward: FeedForward) -> ModelSpec:
    require(keys.logits_scaling > 0, f"logits_scaling is {keys.logits_scaling}")
    bias = keys.attention_bias
    layer = Layer(
        mixer=keys.gqa(scale=keys.attention_multiplier, qkv_bias=bias, o_bias=bias),
        feed_forward=feed_forward,
        pre_norm=keys.norm,
        residual_multiplier=keys.residual_multiplier,
    )
    return keys.model(
        [layer] * keys.num_hidden_layers,
        embedding_multiplier=keys.embedding_multiplier,
        logit_multiplier=1 / keys.logits_scaling,
    )


def moe_names(keys: GraniteMoeKeys) -> Sequence[Rule]:
    """The experts of a layer are in two tensors."""
    width = keys.intermediate_size
    return (
        Rename(r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
        Unstack(r"\.block_sparse_moe\.input_linear\.", r".mlp.experts.{}.gate_up_proj."),
        Unstack(r"\.block_sparse_moe\.output_linear\.", r".mlp.experts.{}.down_proj."),
        SplitRows(r"\.gate_up_proj\.", ((".gate_proj.", width), (".up_proj.", width))),
    )


GRANITE = Family(keys=GraniteKeys, read=read)
GRANITE_MOE = Family(keys=GraniteMoeKeys, read=read_moe, names=moe_names)
