"""Portable GPU kernels in Triton: the path for chips that the native library has no kernel for.

Functions here take what the binding's take (`_bind.pyi`), less what only the library's kernels
know. Importing this package imports Triton and torch.
"""

from __future__ import annotations

from .attention import flash_attn_varlen, flash_attn_with_kvcache
from .experts_codes import fused_experts_codes
from .fp8_gemm import bmm_fp8, fp8_blockwise_scaled_mm, fp8_scaled_mm
from .grouped_gemm import m_grouped_gemm_contiguous, m_grouped_gemm_masked
from .int8_gemm import int8_scaled_mm
from .linear_codes import linear_codes
from .mla import mla_decode
from .moe import fused_experts
from .sampling import top_k_top_p_sampling

__all__ = [
    "bmm_fp8",
    "flash_attn_varlen",
    "flash_attn_with_kvcache",
    "fp8_blockwise_scaled_mm",
    "fp8_scaled_mm",
    "fused_experts",
    "fused_experts_codes",
    "int8_scaled_mm",
    "linear_codes",
    "m_grouped_gemm_contiguous",
    "m_grouped_gemm_masked",
    "mla_decode",
    "top_k_top_p_sampling",
]
