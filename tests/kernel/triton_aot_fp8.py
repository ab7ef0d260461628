"""As `triton_aot`, the variants of FP8 products: what the target multiplies, and what it has to
widen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radix_kernels.triton.fp8_gemm import choose_tiles
from radix_kernels.triton.fp8_gemm_kernel import scaled_product

# Target -> its FP8 format, as Triton calls it.
FORMATS = {"gfx942": "fp8e4b8", 89: "fp8e4nv"}
FREE = ("rows", "a_batch", "b_batch", "out_batch", "sa_row", "sa_block", "sb_column", "sb_block")


def fp8_variants(target: GPUTarget, shared: int) -> Iterator[tuple[str, Any]]:
    """Block scales of many rows in the target's format, the other one with a bias of a few, batches
    of one row."""
    own = FORMATS.get(target.arch)
    if own is None:
        return
    for rows, widen, blocks, batched in (
        (4096, False, True, False),
        (64, True, False, False),
        (1, True, False, True),
    ):
        tile = choose_tiles(rows, widen, shared)
        constants: dict[str, Any] = {
            "N": 4096,
            "K": 2000 if batched else 2048,
            "BATCHED": batched,
            "BLOCKS": blocks,
            "BIAS": rows == 64,
            "WIDEN": widen,
            "FNUZ": (own == "fp8e4b8") != widen,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP": tile.group,
        }
        if rows != 64:
            constants["bias"] = None
        fp8 = "u8" if widen else own
        types = {
            "a": fp8,
            "b": fp8,
            "a_scale": "fp32",
            "b_scale": "fp32",
            "bias": "bf16",
            "out": "bf16",
        }
        source = _source(constants, types)
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        yield (
            f"scaled_product {rows} rows, {fp8}",
            triton.compile(source, target=target, options=options),
        )


def _source(constants: dict[str, Any], types: dict[str, str]) -> ASTSource:
    """The kernel for these constants; types: of the pointers."""
    signature = {}
    attributes = {}
    for index, name in enumerate(scaled_product.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in types:
            signature[name] = "*" + types[name]
        else:
            signature[name] = "i64" if name.endswith("_batch") else "i32"
        if name not in constants and name not in FREE:
            attributes[index,] = [["tt.divisibility", 16]]
    return ASTSource(fn=scaled_product, signature=signature, constexprs=constants, attrs=attributes)
