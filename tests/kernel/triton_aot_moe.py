"""As `triton_aot`, for experts, grouped and FP8 products: `python -m tests.kernel.triton_aot_moe
TARGET...`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radix_kernels.gating import GELU, SILU, SWIGLU_CLAMPED
from radix_kernels.triton.grouped_gemm import choose_tiles as grouped_tiles
from radix_kernels.triton.grouped_gemm_kernel import grouped_product
from radix_kernels.triton.moe import CDNA_SHARED, FEW_PAIRS, HOPPER_SHARED, Tiles, choose_tiles
from radix_kernels.triton.moe_kernel import combine, product
from tests.kernel.triton_aot import facts, target_of
from tests.kernel.triton_aot_fp8 import FORMATS, fp8_variants
from tests.kernel.triton_aot_int8 import int8_variants

ADA_SHARED = 101376  # the least of the NVIDIA chips that we ship to
INTS = ("ids", "expert_map", "sorted_ids", "block_experts", "total", "groups")
FLOATS = ("scale", "weights", "x_scale", "w_scale")
# (dtype, itemsize, weights, scale kind, pairs, experts, hidden, inter): few pairs, some and many a
# block; FP8; a tail.
SHAPES = [
    ("bf16", 2, "bf16", 0, 8, 128, 2048, 768),
    ("bf16", 2, "bf16", 0, 512, 128, 2048, 768),
    ("fp16", 2, "fp16", 0, 4096, 128, 2048, 768),
    ("bf16", 2, "bf16", 0, 32768, 128, 2048, 768),
    ("bf16", 2, "fp8e4nv", 2, 8, 128, 2048, 768),
    ("bf16", 2, "fp8e4nv", 2, 32768, 128, 2048, 768),
    ("bf16", 2, "fp8e4nv", 1, 512, 128, 2048, 768),
    ("fp32", 4, "fp32", 0, 512, 8, 1000, 200),
]


def compile_one(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], target: GPUTarget, **options: Any
) -> Any:
    """Pointers and row strides are 16-byte aligned, as torch's are."""
    signature = {}
    attributes = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in INTS:
            kind: str | None = "i32"
        elif name in FLOATS:
            kind = "fp32"
        else:
            kind = types.get(name)
        signature[name] = "i32" if kind is None else "*" + kind
        if name not in ("pairs", "rows"):
            attributes[index,] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=target,
        options=options,
    )


def variants(target: GPUTarget) -> Iterator[tuple[str, Any]]:
    """(name, compiled kernel) of everything that is compiled for the target."""
    shared = _shared_memory(target)
    yield from _expert_products(target, shared)
    for dtype in ("bf16", "fp16", "fp32"):
        types = {"part": dtype, "out": dtype}
        constants = {
            "HIDDEN": 2048,
            "NUM_EXPERTS": 128,
            "LOCALS": 128,
            "TOPK": 8,
            "MAPPED": True,
            "BLOCK": 1024,
        }
        yield f"combine {dtype}", compile_one(combine, constants, types, target, num_warps=4)
    yield from _grouped_products(target, shared)
    yield from fp8_variants(target, shared)
    yield from _biased_products(target, shared)
    yield from int8_variants(target, shared)
    if target.arch in FORMATS:
        yield from _widened(target, shared)


def _shared_memory(target: GPUTarget) -> int:
    if target.backend == "hip":
        return CDNA_SHARED
    return ADA_SHARED if target.arch == 89 else HOPPER_SHARED


def _expert_products(target: GPUTarget, shared: int) -> Iterator[tuple[str, Any]]:
    for dtype, itemsize, weight, scale, pairs, experts, hidden, inter in SHAPES:
        types = {"x": dtype, "w": weight, "out": dtype, "part": dtype}
        weight_size = 1 if weight.startswith("fp8") else itemsize
        up, down = choose_tiles(pairs, experts, itemsize, weight_size, shared)
        few = pairs <= FEW_PAIRS
        for stage, tile in (("up", up), ("down", down)):
            constants = _constants(tile, stage == "up", few, experts, hidden, inter, scale)
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            compiled = compile_one(product, constants, types, target, **options)
            yield f"product {stage} {dtype} {weight} scale {scale} pairs {pairs}", compiled


def _biased_products(target: GPUTarget, shared: int) -> Iterator[tuple[str, Any]]:
    """gpt-oss's experts, and GELU's."""
    types = {"x": "bf16", "w": "bf16", "bias": "bf16", "out": "bf16"}
    for activation, pairs in ((SWIGLU_CLAMPED, 4), (SWIGLU_CLAMPED, 8192), (GELU, 256)):
        tiles = choose_tiles(pairs, 32, 2, 2, shared)
        for stage, tile in zip(("up", "down"), tiles, strict=True):
            few = pairs <= FEW_PAIRS
            constants = _constants(tile, stage == "up", few, 32, 2880, 2880, 0)
            constants |= {"ACTIVATION": activation, "ALPHA": 1.702, "LIMIT": 7.0, "BIASED": True}
            constants.pop("bias")
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            compiled = compile_one(product, constants, types, target, **options)
            yield f"product {stage} bf16 activation {activation} pairs {pairs}", compiled


def _grouped_products(target: GPUTarget, shared: int) -> Iterator[tuple[str, Any]]:
    dtypes = [("bf16", 2), ("fp16", 2), ("fp32", 4)]
    if target.backend == "cuda":  # a chip whose FP8 is another format widens ours: `_widened`
        dtypes.append(("fp8e4nv", 1))
    for dtype, itemsize in dtypes:
        for masked, rows in ((False, 128), (True, 16)):
            tile = grouped_tiles(rows, itemsize, shared)
            scaled = itemsize == 1
            constants = _grouped_constants(tile, masked=masked, scaled=scaled, widen=False)
            types = {"x": dtype, "w": dtype, "out": "bf16" if scaled else dtype}
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            compiled = compile_one(grouped_product, constants, types, target, **options)
            yield f"grouped masked {masked} {dtype}", compiled


def _widened(target: GPUTarget, shared: int) -> Iterator[tuple[str, Any]]:
    """Of FP8 that the chip does not know."""
    types = {"x": "bf16", "w": "u8", "out": "bf16"}
    up, _ = choose_tiles(512, 128, 2, 1, shared)
    constants = _constants(up, True, False, 128, 2048, 768, 2) | {"WIDEN": True}
    options = {"num_warps": up.num_warps, "num_stages": up.num_stages}
    yield "product up widened", compile_one(product, constants, types, target, **options)
    tile = grouped_tiles(128, 1, shared, widen=True)
    types["x"] = "u8"
    constants = _grouped_constants(tile, masked=False, scaled=True, widen=True)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    yield "grouped widened", compile_one(grouped_product, constants, types, target, **options)


def _grouped_constants(tile: Any, *, masked: bool, scaled: bool, widen: bool) -> dict[str, Any]:
    constants = {
        "EXPERTS": 128,
        "K": 2048,
        "N": 768,
        "MASKED": masked,
        "SCALED": scaled,
        "WIDEN": widen,
        "FNUZ": False,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": tile.group,
    }
    if not scaled:
        constants |= {"x_scale": None, "w_scale": None}
    return constants


def _constants(
    tile: Tiles, gated: bool, few: bool, experts: int, hidden: int, inter: int, scale: int
) -> dict[str, Any]:
    constants: dict[str, Any] = {
        "K": hidden if gated else inter,
        "N": inter if gated else hidden,
        "NUM_EXPERTS": experts,
        "LOCALS": experts,
        "TOPK": 8 if gated else 1,
        "GATED": gated,
        "ACTIVATION": SILU,
        "ALPHA": 0.0,
        "LIMIT": 0.0,
        "BIASED": False,
        "FEW": few,
        "MAPPED": few,
        "SCALE": scale,
        "WIDEN": False,
        "FNUZ": False,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": tile.group,
        "SWAP": tile.swap,
    }
    missing = ["sorted_ids", "block_experts", "total"] if few else ["expert_map"]
    missing.append("bias")
    if not scale:
        missing.append("scale")
    return constants | dict.fromkeys(missing)


if __name__ == "__main__":
    for target_name in sys.argv[1:]:
        for kernel_name, compiled in variants(target_of(target_name)):
            print(
                json.dumps({"target": target_name, "kernel": kernel_name, **facts(compiled)}),
                flush=True,
            )
