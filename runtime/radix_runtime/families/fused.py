"""Name rules of checkpoints that hold several products in one tensor."""

from collections.abc import Sequence

from .keys import DecoderKeys
from .names import Rule, SplitRows


def gate_up_rules(keys: DecoderKeys) -> Sequence[Rule]:
    """Gate and up of an MLP in one tensor."""
    width = keys.intermediate_size
    parts = ((".mlp.gate_proj.", width), (".mlp.up_proj.", width))
    return (SplitRows(r"\.mlp\.gate_up_proj\.", parts),)


def qkv_rules(keys: DecoderKeys) -> Sequence[Rule]:
    """Queries, keys and values in one tensor."""
    kv_rows = keys.kv_heads * keys.head_size
    parts = (
        (".q_proj.", keys.num_attention_heads * keys.head_size),
        (".k_proj.", kv_rows),
        (".v_proj.", kv_rows),
    )
    return (SplitRows(r"\.qkv_proj\.", parts),)
