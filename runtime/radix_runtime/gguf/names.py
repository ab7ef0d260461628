"""Name rules: from the tensors of a GGUF file to those of a checkpoint of the same family, whose
own rules come after them."""

from collections.abc import Sequence

from ..families.names import Drop, Rename, Rule, Unstack
from .views import Row, Shift, SplitHeadPairs

_TENSORS = (
    Drop(r"^rope_(freqs|factors_long|factors_short)\.|\.attn_rot_embd\."),  # keys.py reads them
    Rename(r"^token_embd\.", "model.embed_tokens."),
    Rename(r"^output_norm\.", "model.norm."),
    Rename(r"^output\.", "lm_head."),
    Rename(r"^blk\.(\d+)\.", r"model.layers.\1."),
    Rename(r"\.attn_norm\.", ".input_layernorm."),
    Rename(r"\.attn_(q|k|v|qkv)\.", r".self_attn.\1_proj."),
    Rename(r"\.attn_output\.", ".self_attn.o_proj."),
    Rename(r"\.attn_(q|k)_norm\.", r".self_attn.\1_norm."),
    Rename(r"\.attn_sinks\.weight$", ".self_attn.sinks"),
    Rename(r"\.ffn_(gate|up|down)\.(?!\d)", r".mlp.\1_proj."),
)
_EXPERTS = (
    Rename(r"\.ffn_gate_inp\.", ".mlp.gate."),
    Rename(r"\.ffn_(gate|up|down)\.(\d+)\.", r".mlp.experts.\2.\1_proj."),  # files of early 2024
    Unstack(r"\.ffn_(gate|up|down)_exps\.", r".mlp.experts.{}.\1_proj."),
    Rename(r"\.ffn_(gate|up|down)_shexp\.", r".mlp.shared_expert.\1_proj."),
    Rename(r"\.exp_probs_b\.bias$", ".mlp.gate.e_score_correction_bias"),
    Rename(r"\.ffn_gate_inp_shexp\.", ".mlp.shared_expert_gate."),
    Row(r"\.shared_expert_gate\.weight$"),
)
_LATENTS = (
    Rename(r"\.attn_(q|kv)_a_norm\.", r".self_attn.\1_a_layernorm."),
    Rename(r"\.attn_kv_a_mqa\.", ".self_attn.kv_a_proj_with_mqa."),
    Rename(r"\.attn_(q_a|q_b|kv_b)\.", r".self_attn.\1_proj."),
)
_SHIFT = Shift(r"norm\.weight$", by=-1.0)
_FUSED = Rename(r"\.mlp\.up_proj\.", ".mlp.gate_up_proj.")
_PRE_NORMS = (Rename(r"\.ffn_norm\.", ".post_attention_layernorm."),)
_POST_NORMS = (
    Rename(r"\.post_attention_norm\.", ".post_attention_layernorm."),
    Rename(r"\.post_ffw_norm\.", ".post_feedforward_layernorm."),
)


def pre_norm_names() -> Sequence[Rule]:
    """A norm before each block."""
    return (*_TENSORS, *_EXPERTS, *_PRE_NORMS)


def second_norm_names() -> Sequence[Rule]:
    """A norm before each block, of which the second is called after attention."""
    return (*_TENSORS, *_EXPERTS, *_POST_NORMS)


def paired_names(*, heads: int, kv_heads: int) -> Sequence[Rule]:
    """The same, with the rows of queries and keys in llama.cpp's order."""
    return (
        *pre_norm_names(),
        SplitHeadPairs(r"\.q_proj\.", heads=heads),
        SplitHeadPairs(r"\.k_proj\.", heads=kv_heads),
    )


def post_norm_names() -> Sequence[Rule]:
    """A norm after each block."""
    return (*_TENSORS, *_POST_NORMS)


def shifted_names() -> Sequence[Rule]:
    """Gemma, the first: a norm before each block, of which the files hold weights, checkpoints
    weights less one."""
    return (*_TENSORS, *_PRE_NORMS, _SHIFT)


def gemma_names() -> Sequence[Rule]:
    """Norms before and after each block. The files hold weights, checkpoints weights less one."""
    return (
        *_TENSORS,
        Rename(r"\.ffn_norm\.", ".pre_feedforward_layernorm."),
        *_POST_NORMS,
        _SHIFT,
    )


def latent_names() -> Sequence[Rule]:
    """Latent attention."""
    return (*_LATENTS, *pre_norm_names())


def fused_names() -> Sequence[Rule]:
    """Phi-3: gate and up in one tensor, called after the latter."""
    return (*_TENSORS, *_PRE_NORMS, _FUSED)


def fused_post_norm_names() -> Sequence[Rule]:
    """GLM-4: so too, and norms before and after each block."""
    return (
        *_TENSORS,
        _FUSED,
        Rename(r"\.post_attention_norm\.", ".post_self_attn_layernorm."),
        Rename(r"\.post_ffw_norm\.", ".post_mlp_layernorm."),
        *_PRE_NORMS,
    )
