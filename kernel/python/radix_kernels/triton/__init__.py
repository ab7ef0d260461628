"""Portable GPU kernels in Triton: the path for chips that the native library has no kernel for.

Functions here have the signature of the binding (`_bind.pyi`). Importing this package imports
Triton and torch.
"""

from __future__ import annotations

from .attention import flash_attn_with_kvcache
from .grouped_gemm import m_grouped_gemm_contiguous, m_grouped_gemm_masked
from .moe import fused_experts
from .sampling import top_k_top_p_sampling

__all__ = [
    "flash_attn_with_kvcache",
    "fused_experts",
    "m_grouped_gemm_contiguous",
    "m_grouped_gemm_masked",
    "top_k_top_p_sampling",
]
