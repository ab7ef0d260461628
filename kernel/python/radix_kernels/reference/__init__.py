"""Every op in plain torch: the definition, the oracle of the tests, and the fallback.

Arguments are torch tensors of any floating dtype (float64 inputs give results that nothing has
rounded). `compute_dtype` is the dtype in which everything between inputs and outputs is computed;
outputs and in-place buffers are rounded once, to their own dtype. Nothing is checked here.
"""

from __future__ import annotations

import torch

from .activation import gated, gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from .all_reduce import all_reduce, all_reduce_add_rmsnorm
from .attention import flash_attn_varlen, flash_attn_with_kvcache, merge_state
from .fused_rope import fused_qk_norm_rope_store
from .gemm import (
    bmm_fp8,
    fp8_blockwise_scaled_mm,
    fp8_scaled_mm,
    int8_scaled_mm,
    linear_silu_and_mul,
)
from .grouped_gemm import m_grouped_gemm_contiguous, m_grouped_gemm_masked
from .kv_cache import store_kv_cache
from .linear import (
    dequantize_weight,
    embedding,
    linear,
    linear_argmax,
    linear_heads,
    quantize_rows,
    quantize_weight,
    row_argmax,
)
from .mla import (
    concat_mla_k,
    gather_mla_kv,
    mla_decode,
    pack_mla_tokens,
    store_mla_kv,
    unpack_mla_cache,
)
from .moe import (
    fused_experts,
    moe_align_block_size,
    moe_fused_gate,
    moe_sum,
    topk_sigmoid,
    topk_softmax,
)
from .norm import fused_add_rmsnorm, layernorm, rmsnorm
from .packed_experts import fused_experts_packed
from .philox import philox4x32, uniform
from .quantize import (
    per_tensor_quant_fp8,
    per_token_group_quant,
    per_token_quant_fp8,
    rmsnorm_quant_fp8,
    silu_and_mul_quant_fp8,
)
from .quantize_int8 import per_token_quant_int8, rmsnorm_quant_int8, silu_and_mul_quant_int8
from .rope import apply_rope_inplace, rope_cos_sin_cache
from .sampling import (
    apply_penalties_inplace,
    count_tokens_inplace,
    edited_logits,
    kept_ids,
    token_logprobs,
    top_k_top_p_sampling,
)
from .sampling_shards import sample_candidates, sampling_candidates
from .step import accept_tokens, fill_step_tensors


def float32() -> torch.dtype:
    """The compute dtype of the fallback, for callers that do not import torch."""
    return torch.float32


__all__ = [
    "accept_tokens",
    "all_reduce",
    "all_reduce_add_rmsnorm",
    "apply_penalties_inplace",
    "apply_rope_inplace",
    "bmm_fp8",
    "concat_mla_k",
    "count_tokens_inplace",
    "dequantize_weight",
    "edited_logits",
    "embedding",
    "fill_step_tensors",
    "flash_attn_varlen",
    "flash_attn_with_kvcache",
    "float32",
    "fp8_blockwise_scaled_mm",
    "fp8_scaled_mm",
    "fused_add_rmsnorm",
    "fused_experts",
    "fused_experts_packed",
    "fused_qk_norm_rope_store",
    "gated",
    "gather_mla_kv",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "int8_scaled_mm",
    "kept_ids",
    "layernorm",
    "linear",
    "linear_argmax",
    "linear_heads",
    "linear_silu_and_mul",
    "m_grouped_gemm_contiguous",
    "m_grouped_gemm_masked",
    "merge_state",
    "mla_decode",
    "moe_align_block_size",
    "moe_fused_gate",
    "moe_sum",
    "pack_mla_tokens",
    "per_tensor_quant_fp8",
    "per_token_group_quant",
    "per_token_quant_fp8",
    "per_token_quant_int8",
    "philox4x32",
    "quantize_rows",
    "quantize_weight",
    "rmsnorm",
    "rmsnorm_quant_fp8",
    "rmsnorm_quant_int8",
    "rope_cos_sin_cache",
    "row_argmax",
    "sample_candidates",
    "sampling_candidates",
    "silu_and_mul",
    "silu_and_mul_quant_fp8",
    "silu_and_mul_quant_int8",
    "store_kv_cache",
    "store_mla_kv",
    "token_logprobs",
    "top_k_top_p_sampling",
    "topk_sigmoid",
    "topk_softmax",
    "uniform",
    "unpack_mla_cache",
]
