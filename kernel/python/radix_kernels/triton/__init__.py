"""Portable GPU kernels in Triton: the path for chips that the native library has no kernel for.

Functions here have the signature of the binding (`_bind.pyi`). Importing this package imports
Triton and torch.
"""

from __future__ import annotations

from .attention import flash_attn_with_kvcache
from .moe import fused_experts

__all__ = ["flash_attn_with_kvcache", "fused_experts"]
