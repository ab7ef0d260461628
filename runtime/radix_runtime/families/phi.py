"""Phi-3 and Phi-4."""

from collections.abc import Sequence

from ..specs import Layer, ModelSpec
from .family import Family
from .fused import gate_up_rules, qkv_rules
from .keys import DecoderKeys, Size
from .names import Rule


class Phi3Keys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of Phi-3 and Phi-4."""

    rms_norm_eps: float = 1e-5
    original_max_position_embeddings: Size | None = 4096
    sliding_window: Size | None = None


def read(keys: Phi3Keys) -> ModelSpec:
    """Llama with a window; the long-context models have LongRoPE, which some files call su or
    yarn."""
    settings = dict(keys.rope_parameters or {})
    if settings.get("rope_type") in ("su", "yarn"):
        settings["rope_type"] = "longrope"
    layer = Layer(
        mixer=keys.gqa(rope=keys.rope(settings), window=keys.sliding_window),
        feed_forward=keys.mlp,
        pre_norm=keys.norm,
    )
    return keys.model([layer] * keys.num_hidden_layers)


def names(keys: Phi3Keys) -> Sequence[Rule]:
    """Attention's products are in one tensor, and the MLP's first two."""
    return (*qkv_rules(keys), *gate_up_rules(keys))


PHI3 = Family(
    keys=Phi3Keys,
    read=read,
    names=names,
    ignored=frozenset({"attention_bias", "embd_pdrop", "full_attn_mod", "interpolate_factor",
                       "lm_head_bias", "mlp_bias"}),
)  # fmt: skip
