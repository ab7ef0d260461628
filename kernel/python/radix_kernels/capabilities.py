"""What runs here, op by op."""

from __future__ import annotations

import platform
import sys
from typing import Any

from . import _dispatch, _loader

_FLOATS = ("bfloat16", "float16", "float32")
_FP8 = ("float8_e4m3fn",)
OP_DTYPES: dict[str, tuple[str, ...]] = {
    "rmsnorm": _FLOATS,
    "fused_add_rmsnorm": _FLOATS,
    "layernorm": _FLOATS,
    "apply_rope_inplace": _FLOATS,
    "fused_qk_norm_rope_store": _FLOATS,
    "silu_and_mul": _FLOATS,
    "gelu_and_mul": _FLOATS,
    "gelu_tanh_and_mul": _FLOATS,
    "store_kv_cache": _FLOATS,
    "flash_attn_with_kvcache": _FLOATS,
    "flash_attn_varlen": _FLOATS,
    "merge_state": _FLOATS,
    "mla_decode": ("bfloat16", "float16"),
    "store_mla_kv": ("bfloat16", "float16"),
    "concat_mla_k": ("bfloat16", "float16"),
    "linear": _FLOATS,
    "linear_argmax": _FLOATS,
    "linear_silu_and_mul": _FLOATS,
    "fp8_scaled_mm": _FP8,
    "fp8_blockwise_scaled_mm": _FP8,
    "bmm_fp8": _FP8,
    "per_tensor_quant_fp8": _FLOATS,
    "per_token_quant_fp8": _FLOATS,
    "per_token_group_quant": _FLOATS,
    "silu_and_mul_quant_fp8": _FLOATS,
    "rmsnorm_quant_fp8": _FLOATS,
    "embedding": _FLOATS,
    "topk_softmax": _FLOATS,
    "topk_sigmoid": _FLOATS,
    "moe_fused_gate": _FLOATS,
    "moe_align_block_size": ("int32",),
    "moe_sum": _FLOATS,
    "fused_experts": _FLOATS,
    "fused_experts_packed": _FLOATS,
    "m_grouped_gemm_contiguous": _FLOATS + _FP8,
    "m_grouped_gemm_masked": _FLOATS + _FP8,
    "apply_penalties_inplace": ("float32",),
    "count_tokens_inplace": ("int32",),
    "top_k_top_p_sampling": ("float32",),
    "top_k_top_p_sampling_with_logprobs": ("float32",),
    "sampling_candidates": ("float32",),
    "sample_candidates": ("int64",),
    "token_logprobs": ("float32",),
}
# What an op takes on some devices besides, where it is not the reference: keys and values with
# scales, AMD's FP8.
_SCALED_DTYPES: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {"flash_attn_with_kvcache": ("int8",), "store_kv_cache": ("int8",)},
    "cuda": {"flash_attn_with_kvcache": _FP8, "flash_attn_varlen": _FP8, "store_kv_cache": _FP8},
    "rocm": {
        **dict.fromkeys(
            ("flash_attn_with_kvcache", "flash_attn_varlen"), (*_FP8, "float8_e4m3fnuz")
        ),
        "store_kv_cache": ("float8_e4m3fnuz",),
        **dict.fromkeys(
            (op for op, dtypes in OP_DTYPES.items() if _FP8[0] in dtypes), ("float8_e4m3fnuz",)
        ),
    },
}
# Public ops whose binding function has another name.
_NATIVE_NAMES = {
    "linear": "linear_dense",
    "linear_silu_and_mul": "linear_dense",
    "per_token_group_quant": "per_token_quant_fp8",
    "silu_and_mul_quant_fp8": "per_token_quant_fp8",
    "embedding": "embedding_packed",
    "fused_experts_packed": "PackedExperts",
    "top_k_top_p_sampling_with_logprobs": "top_k_top_p_sampling",
}
# And where the CPU has one of its own for it.
_CPU_NAMES = {"linear": "linear_packed", "linear_silu_and_mul": "linear_packed"}
# A native kernel that is not for every call: what the others get.
_PARTLY = {"linear": "native kernel up to 64 rows and with a residual, else the vendor's BLAS"}


def capabilities() -> dict[str, Any]:
    """The implementation of each op and dtype on this installation, and why.

    Keys: `backend` (cpu, cuda, rocm, or None without a native library), `version`, `abi_version`,
    `isa`, `devices` (device types the backend serves here), `python`, and `ops`: op -> dtype ->
    {`impl`: `cpu:avx512` | `triton` | `reference` ..., `why`}. An op is described for the
    backend's device; without a backend, for the CPU. The dtype of attention and of `store_kv_cache`
    is that of the cache (queries then have it too, or are 16-bit for FP8, any float for INT8).
    """
    device = {"cuda": "cuda", "rocm": "rocm"}.get(str(_loader.backend), "cpu")
    ops: dict[str, dict[str, dict[str, str]]] = {}
    for op, dtypes in OP_DTYPES.items():
        name = _NATIVE_NAMES.get(op, op)
        native = _CPU_NAMES.get(op, name) if device == "cpu" else name
        found = {
            dtype: _dispatch.describe(native, device, dtype)
            for dtype in dtypes + _SCALED_DTYPES[device].get(op, ())
        }
        ops[op] = {dtype: {"impl": impl, "why": why} for dtype, (impl, why) in found.items()}
        if device != "cpu" and op in _PARTLY:
            for entry in ops[op].values():
                entry["why"] = _PARTLY[op] if entry["why"] == "native kernel" else entry["why"]
    return {
        "backend": _loader.backend,
        "version": _loader.version,
        "abi_version": _loader.abi_version,
        "isa": _dispatch.isa(),
        "devices": _devices(device),
        "python": platform.python_version(),
        "ops": ops,
    }


def _devices(device: str) -> list[str]:
    """The CPU, and the GPU's device type when torch is loaded and sees one."""
    torch = sys.modules.get("torch")
    found = device != "cpu" and torch is not None and torch.cuda.is_available()
    return ["cpu", device] if found else ["cpu"]
