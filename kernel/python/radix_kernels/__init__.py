"""Kernels for language-model inference: one set of functions on every platform.

Tensors are torch tensors or any other DLPack type. Importing this package imports no framework.
`radix_kernels.reference` holds the definitions (plain torch), `capabilities()` says what runs
here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _loader
from ._dispatch import get_fallback, set_fallback
from .activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from .attention import flash_attn_varlen, flash_attn_with_kvcache, merge_state
from .capabilities import capabilities
from .decoder import DecoderLayer, DenseDecoder
from .formats import unpack_awq, unpack_gguf, unpack_gptq
from .fused_rope import fused_qk_norm_rope_store
from .gemm import bmm_fp8, fp8_blockwise_scaled_mm, fp8_scaled_mm, linear_silu_and_mul
from .grouped_gemm import m_grouped_gemm_contiguous, m_grouped_gemm_masked
from .kv_cache import store_kv_cache
from .linear import embedding, linear, linear_argmax
from .mla import concat_mla_k, mla_decode, store_mla_kv
from .moe import (
    fused_experts,
    moe_align_block_size,
    moe_fused_gate,
    moe_sum,
    topk_sigmoid,
    topk_softmax,
)
from .norm import fused_add_rmsnorm, layernorm, rmsnorm
from .packed_experts import PackedExperts, fused_experts_packed, pack_experts
from .packed_weight import PackedWeight, pack_weight, unpack_weight
from .quantize import (
    per_tensor_quant_fp8,
    per_token_group_quant,
    per_token_quant_fp8,
    rmsnorm_quant_fp8,
    silu_and_mul_quant_fp8,
)
from .rope import apply_rope_inplace, rope_cos_sin_cache
from .sampling import (
    LogitEdits,
    apply_penalties_inplace,
    count_tokens_inplace,
    token_logprobs,
    top_k_top_p_sampling,
    top_k_top_p_sampling_with_logprobs,
)
from .sampling_shards import sample_candidates, sampling_candidates
from .threads import get_num_threads, set_num_threads

if TYPE_CHECKING:
    from .comm import GpuCommunicator, ShmCommunicator

__version__: str = _loader.version
abi_version: int | None = _loader.abi_version

# Loaded on first use: they import a framework.
_LAZY = {
    "GpuCommunicator": "comm",
    "ShmCommunicator": "comm",
    "reference": "reference",
    "torch_ops": "torch_ops",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'radix_kernels' has no attribute {name!r}")
    module = import_module(f"{__name__}.{_LAZY[name]}")
    return module if name == _LAZY[name] else getattr(module, name)


__all__ = [
    "DecoderLayer",
    "DenseDecoder",
    "GpuCommunicator",
    "LogitEdits",
    "PackedExperts",
    "PackedWeight",
    "ShmCommunicator",
    "__version__",
    "abi_version",
    "apply_penalties_inplace",
    "apply_rope_inplace",
    "bmm_fp8",
    "capabilities",
    "concat_mla_k",
    "count_tokens_inplace",
    "embedding",
    "flash_attn_varlen",
    "flash_attn_with_kvcache",
    "fp8_blockwise_scaled_mm",
    "fp8_scaled_mm",
    "fused_add_rmsnorm",
    "fused_experts",
    "fused_experts_packed",
    "fused_qk_norm_rope_store",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "get_fallback",
    "get_num_threads",
    "layernorm",
    "linear",
    "linear_argmax",
    "linear_silu_and_mul",
    "m_grouped_gemm_contiguous",
    "m_grouped_gemm_masked",
    "merge_state",
    "mla_decode",
    "moe_align_block_size",
    "moe_fused_gate",
    "moe_sum",
    "pack_experts",
    "pack_weight",
    "per_tensor_quant_fp8",
    "per_token_group_quant",
    "per_token_quant_fp8",
    "rmsnorm",
    "rmsnorm_quant_fp8",
    "rope_cos_sin_cache",
    "sample_candidates",
    "sampling_candidates",
    "set_fallback",
    "set_num_threads",
    "silu_and_mul",
    "silu_and_mul_quant_fp8",
    "store_kv_cache",
    "store_mla_kv",
    "token_logprobs",
    "top_k_top_p_sampling",
    "top_k_top_p_sampling_with_logprobs",
    "topk_sigmoid",
    "topk_softmax",
    "unpack_awq",
    "unpack_gguf",
    "unpack_gptq",
    "unpack_weight",
]
