"""As `triton_aot`, the variants of INT8 products, on every target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radix_kernels.triton.fp8_gemm import choose_tiles
from radix_kernels.triton.int8_gemm_kernel import int8_product

FREE = ("rows", "sa_row", "sb_column", "azp_row")
TYPES = {
    "a": "i8",
    "b": "i8",
    "a_scale": "fp32",
    "b_scale": "fp32",
    "azp": "i32",
    "b_sums": "i32",
    "bias": "bf16",
    "out": "bf16",
}


def int8_variants(target: GPUTarget, shared: int) -> Iterator[tuple[str, Any]]:
    """Many rows with nothing else, a few with zero points and a bias and a tail of K."""
    for rows, shifted in ((4096, False), (16, True)):
        tile = choose_tiles(rows, False, shared)
        constants: dict[str, Any] = {
            "N": 4096,
            "K": 2000 if shifted else 2048,
            "SHIFTED": shifted,
            "BIAS": shifted,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP": tile.group,
        }
        if not shifted:
            constants |= dict.fromkeys(("azp", "b_sums", "bias"))
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        compiled = triton.compile(_source(constants), target=target, options=options)
        yield f"int8_product {rows} rows", compiled


def _source(constants: dict[str, Any]) -> ASTSource:
    signature = {}
    attributes = {}
    for index, name in enumerate(int8_product.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in TYPES:
            signature[name] = "*" + TYPES[name]
        else:
            signature[name] = "i32"
        if name not in constants and name not in FREE:
            attributes[index,] = [["tt.divisibility", 16]]
    return ASTSource(fn=int8_product, signature=signature, constexprs=constants, attrs=attributes)
