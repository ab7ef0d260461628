"""As `triton_aot`, for products and experts over weights of codes: `python -m
tests.kernel.triton_aot_codes TARGET...`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget

from radix_kernels.gating import SILU, SWIGLU_CLAMPED
from radix_kernels.triton.codes_tile import KINDS
from radix_kernels.triton.experts_codes import choose_expert_tiles
from radix_kernels.triton.experts_codes_kernel import codes_expert_product
from radix_kernels.triton.linear_codes import choose_tiles
from radix_kernels.triton.linear_codes_kernel import codes_product
from radix_kernels.triton.moe import CDNA_SHARED, FEW_PAIRS, HOPPER_SHARED
from tests.kernel.triton_aot import facts, target_of
from tests.kernel.triton_aot_moe import compile_one

# The least of the chips of a capability: A100's and consumer Ampere's, Ada's.
SHARED = {80: 166912, 89: 101376, 90: HOPPER_SHARED}
# (kind, group, zeros, minima, x, itemsize, rows, gate)
PRODUCTS = [
    ("int4", 128, True, False, "bf16", 2, 1, 0),
    ("int4", 128, True, False, "fp16", 2, 4096, 0),
    ("int4", 64, False, False, "bf16", 2, 64, 1),
    ("int4", 32, False, True, "bf16", 2, 20, 2),
    ("int8", 0, False, False, "bf16", 2, 1, 0),
    ("int8", 16, False, True, "fp16", 2, 512, 0),
    ("int8", 32, False, False, "fp32", 4, 40, 1),
    ("mxfp4", 32, False, False, "bf16", 2, 1, 1),
]
# (kind, group, zeros, x, itemsize, pairs, experts, hidden, inter, activation)
EXPERTS = [
    ("int4", 128, True, "bf16", 2, 8, 128, 2048, 768, SILU),
    ("int4", 32, False, "bf16", 2, 4096, 128, 2048, 768, SILU),
    ("int8", 0, False, "fp16", 2, 512, 128, 2048, 768, SILU),
    ("mxfp4", 32, False, "bf16", 2, 4, 32, 2880, 2880, SWIGLU_CLAMPED),
    ("mxfp4", 32, False, "bf16", 2, 8192, 32, 2880, 2880, SWIGLU_CLAMPED),
]


def _shared(target: GPUTarget) -> int:
    return CDNA_SHARED if target.backend == "hip" else SHARED[target.arch]


def _types(kind: str, dtype: str) -> dict[str, str]:
    return {
        "x": dtype,
        "codes": "i8" if kind == "int8" else "u8",
        "scales": "u8" if kind == "mxfp4" else "bf16",
        "zeros": "u8",
        "mins": "bf16",
        "bias": dtype,
        "residual": dtype,
        "out": dtype,
    }


def products(target: GPUTarget) -> Iterator[tuple[str, Any]]:
    for kind, group, zeros, mins, dtype, itemsize, rows, gate in PRODUCTS:
        tile = choose_tiles(rows, group, itemsize, gate != 0, _shared(target))
        with_residual = rows == 1 and not gate
        constants: dict[str, Any] = {
            "N": 4096,
            "K": 2080,
            "KIND": KINDS[kind],
            "GROUP": group,
            "ZEROS": zeros,
            "MINS": mins,
            "BIAS": with_residual,
            "RESIDUAL": with_residual,
            "GATE": gate,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group,
        }
        missing = [] if zeros else ["zeros"]
        missing += [] if mins else ["mins"]
        missing += [] if with_residual else ["bias", "residual"]
        constants |= dict.fromkeys(missing)
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        found = compile_one(codes_product, constants, _types(kind, dtype), target, **options)
        yield f"codes_product {kind} {group} {dtype} {rows} rows gate {gate}", found


def experts(target: GPUTarget) -> Iterator[tuple[str, Any]]:
    for kind, group, zeros, dtype, itemsize, pairs, count, hidden, inter, activation in EXPERTS:
        tiles = choose_expert_tiles(pairs, count, (group, group), itemsize, _shared(target))
        few = pairs <= FEW_PAIRS
        biased = activation == SWIGLU_CLAMPED
        for stage, tile in zip(("up", "down"), tiles, strict=True):
            gated = stage == "up"
            constants: dict[str, Any] = {
                "K": hidden if gated else inter,
                "N": inter if gated else hidden,
                "KIND": KINDS[kind],
                "GROUP": group,
                "SCALE_SIZE": 1 if kind == "mxfp4" else 2,
                "ZEROS": zeros,
                "MINS": False,
                "NUM_EXPERTS": count,
                "LOCALS": count,
                "TOPK": 4 if gated else 1,
                "GATED": gated,
                "ACTIVATION": activation,
                "ALPHA": 1.702,
                "LIMIT": 7.0,
                "BIASED": biased,
                "FEW": few,
                "MAPPED": few,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "BLOCK_K": tile.block_k,
                "GROUP_M": tile.group,
            }
            missing = ["sorted_ids", "block_experts", "total"] if few else ["expert_map"]
            missing += [] if zeros else ["zeros"]
            missing += [] if biased else ["bias"]
            constants |= dict.fromkeys([*missing, "mins"])
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            found = compile_one(
                codes_expert_product, constants, _types(kind, dtype), target, **options
            )
            yield f"codes_expert_product {stage} {kind} {group} {dtype} {pairs} pairs", found


if __name__ == "__main__":
    for target_name in sys.argv[1:]:
        wanted = target_of(target_name)
        for compiled_ones in (products(wanted), experts(wanted)):
            for kernel_name, compiled in compiled_ones:
                line = {"target": target_name, "kernel": kernel_name, **facts(compiled)}
                print(json.dumps(line), flush=True)
