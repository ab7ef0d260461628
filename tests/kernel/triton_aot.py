"""Compile the Triton kernels for chips that are not here; print one JSON line for each.

`python -m tests.kernel.triton_aot TARGET...` with targets such as gfx942 or sm_90. A process of its
own, because Triton fixes at import whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radix_kernels.triton.attention import choose_tiles
from radix_kernels.triton.attention_kernel import attend, combine

POINTERS = {
    "q": "T", "k_cache": "T", "v_cache": "T", "page_table": "i32", "kv_lens": "i32",
    "cu_seqlens": "i32", "sinks": "fp32", "out": "T", "lse": "fp32", "part_out": "fp32",
    "part_lse": "fp32",
}  # fmt: skip
# (dtype, itemsize, head dim, query heads for each KV head, page size)
SHAPES = [("bf16", 2, 128, 8, 16), ("fp16", 2, 64, 2, 1), ("bf16", 2, 256, 4, 64),
          ("fp32", 4, 64, 2, 16), ("fp32", 4, 128, 4, 16)]  # fmt: skip


def target_of(name: str) -> GPUTarget:
    if name.startswith("gfx"):
        return GPUTarget("hip", name, 64)
    return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)


def compile_one(kernel: Any, constants: dict[str, Any], dtype: str, target: GPUTarget, **options):
    """Pointers and row strides are 16-byte aligned, as torch's are."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in POINTERS:
            signature[name] = "*" + POINTERS[name].replace("T", dtype)
            attributes[index,] = [["tt.divisibility", 16]]
        elif name in ("scale", "softcap"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name not in ("rows", "window_left"):
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options)


def variants(target: GPUTarget) -> Iterator[tuple[str, Any]]:
    for dtype, itemsize, dim, group, page in SHAPES:
        sizes = {"HEADS": group * 2, "V_DIM": dim, "V_PAD": dim, "SINKS": True, "WITH_LSE": True}
        for decode in (False, True):
            tiles = choose_tiles(dim, group, itemsize, decode)
            constants = {
                **sizes, "DIM": dim, "DIM_PAD": dim, "GROUP": group, "PAGE_SIZE": page,
                "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "SPLIT": 512 if decode else 0,
                "SPLITS": 8 if decode else 1, "CAUSAL": True, "WINDOW": not decode,
                "SOFTCAP": not decode,
            }  # fmt: skip
            if not decode:
                constants |= {"part_out": None, "part_lse": None}
            name = f"attend {dtype} d{dim} {'decode' if decode else 'prefill'}"
            yield name, compile_one(
                attend, constants, dtype, target,
                num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            )  # fmt: skip
        constants = {**sizes, "SPLITS": 8, "SPLITS_PAD": 8}
        yield f"combine {dtype} d{dim}", compile_one(combine, constants, dtype, target, num_warps=1)


def facts(compiled: Any) -> dict[str, Any]:
    """Shared memory, and what the assembly says of registers, spills and matrix instructions."""
    found: dict[str, Any] = {"shared": compiled.metadata.shared}
    amd = compiled.asm.get("amdgcn")
    if amd is None:
        found["mma"] = len(re.findall(r"\b(?:mma|wgmma)\S*\.sync", compiled.asm["ptx"]))
        return found
    for key in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        found[key] = int(re.search(rf"\.{key}:\s*(\d+)", amd)[1])
    found["vgpr_count"] = int(re.search(r"\.vgpr_count:\s*(\d+)", amd)[1])
    found["mma"] = len(re.findall(r"\bv_mfma_", amd))
    found["wide_loads"] = len(re.findall(r"\b(?:global|buffer)_load_dwordx4", amd))
    found["paired_loads"] = len(re.findall(r"\b(?:global|buffer)_load_dwordx2", amd))
    return found


if __name__ == "__main__":
    for target_name in sys.argv[1:]:
        for kernel_name, compiled in variants(target_of(target_name)):
            line = {"target": target_name, "kernel": kernel_name, **facts(compiled)}
            print(json.dumps(line), flush=True)
