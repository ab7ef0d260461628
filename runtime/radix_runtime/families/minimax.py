"""MiniMax-M2."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ..specs import AllHeadsNorm, Layer, ModelSpec, Moe, SigmoidRouter
from .checks import require
from .family import Family
from .keys import DecoderKeys, Size
from .mixtral import expert_rules
from .names import Rename, Rule, drop_layers


class MiniMaxM2Keys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of MiniMax-M2. `rotary_dim`: the elements of a head that are turned, where
    RoPE's own settings do not say what share of it."""

    head_dim: Size | None = 128
    num_local_experts: Size
    num_experts_per_tok: Size = 8
    rotary_dim: Size | None = None
    use_qk_norm: bool = True
    use_routing_bias: bool = True
    scoring_func: str = "sigmoid"
    num_mtp_modules: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0


def read(keys: MiniMaxM2Keys) -> ModelSpec:
    """Queries and keys are normed over all heads, experts chosen by their sigmoids."""
    require(keys.use_qk_norm, "use_qk_norm false is not supported")
    require(keys.use_routing_bias, "use_routing_bias false is not supported")
    require(keys.scoring_func == "sigmoid", f"scoring_func {keys.scoring_func!r} is not supported")
    settings = dict(keys.rope_parameters or {})
    if keys.rotary_dim is not None:
        settings.setdefault("partial_rotary_factor", keys.rotary_dim / keys.head_size)
    moe = Moe(
        num_experts=keys.num_local_experts,
        width=keys.intermediate_size,
        router=SigmoidRouter(top_k=keys.num_experts_per_tok),
        activation=keys.activation,
    )
    layer = Layer(
        mixer=keys.gqa(rope=keys.rope(settings), qk_norm=AllHeadsNorm(norm=keys.norm)),
        feed_forward=moe,
        pre_norm=keys.norm,
    )
    return keys.model([layer] * keys.num_hidden_layers)


def names(keys: MiniMaxM2Keys) -> Sequence[Rule]:
    """Experts as Mixtral's; the corrections belong to the router."""
    correction = "e_score_correction_bias"
    return (
        drop_layers(keys.num_hidden_layers, keys.num_mtp_modules),
        *expert_rules(keys),
        Rename(rf"\.mlp\.{correction}$", f".mlp.gate.{correction}"),
    )


MINIMAX_M2 = Family(
    keys=MiniMaxM2Keys,
    read=read,
    names=names,
    ignored=frozenset({
        "attn_type_list", "layernorm_full_attention_beta", "layernorm_linear_attention_beta",
        "layernorm_mlp_beta", "mlp_intermediate_size", "mtp_transformer_layers", "qk_norm_type",
        "shared_moe_mode", "use_mtp",
    }),
)  # fmt: skip
