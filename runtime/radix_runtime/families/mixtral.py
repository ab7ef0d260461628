"""Mixtral."""

from collections.abc import Sequence

from ..specs import Layer, ModelSpec, Moe, SoftmaxRouter
from .family import Family
from .keys import DecoderKeys, Size
from .names import Rename, Rule


class MixtralKeys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of Mixtral."""

    rms_norm_eps: float = 1e-5
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2
    sliding_window: Size | None = None


def read(keys: MixtralKeys) -> ModelSpec:
    """Experts in every layer; the weights of the chosen ones add up to 1."""
    moe = Moe(
        num_experts=keys.num_local_experts,
        width=keys.intermediate_size,
        router=SoftmaxRouter(top_k=keys.num_experts_per_tok, renormalize=True),
        activation=keys.activation,
    )
    layer = Layer(mixer=keys.gqa(window=keys.sliding_window), feed_forward=moe, pre_norm=keys.norm)
    return keys.model([layer] * keys.num_hidden_layers)


def expert_rules(keys: DecoderKeys) -> Sequence[Rule]:
    """w1, w2 and w3 are gate, down and up."""
    return (
        Rename(r"\.block_sparse_moe\.", ".mlp."),
        Rename(r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        Rename(r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        Rename(r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    )


MIXTRAL = Family(keys=MixtralKeys, read=read, names=expert_rules)
