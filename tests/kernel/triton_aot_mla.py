"""As `triton_aot`, for MLA: `python -m tests.kernel.triton_aot_mla TARGET...`."""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.compiler import ASTSource

from radix_kernels.triton.mla import MAX_SPLITS, choose_tiles
from radix_kernels.triton.mla_kernel import attend_latent, join_splits
from tests.kernel.triton_aot import facts, target_of

POINTERS = {
    "q_nope": "T",
    "q_rope": "T",
    "kv_cache": "T",
    "page_table": "i32",
    "kv_lens": "i32",
    "cu_seqlens": "i32",
    "out": "T",
    "lse": "fp32",
    "part_out": "fp32",
    "part_lse": "fp32",
}
# (latent values, heads, FP8 form) by target: those of the most registers, and both forms on the
# chip with the least room.
SHAPES = {
    "gfx942": [(512, 16, False), (512, 128, False), (512, 128, True)],
    "gfx950": [(512, 16, False), (256, 16, False)],
    "sm_89": [(512, 128, True)],
}


def compile_one(
    kernel: Any, constants: dict[str, Any], target: Any, **options: Any
) -> dict[str, Any]:
    """Pointers are 16-byte aligned; of the numbers the compiler is told nothing, as at run time."""
    signature = {}
    attributes = {}
    special = []
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in POINTERS:
            dtype = "u8" if name == "kv_cache" and constants["FP8"] else "bf16"
            signature[name] = "*" + POINTERS[name].replace("T", dtype)
            attributes[index,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
            if name != "scale" and not kernel.params[index].do_not_specialize:
                special.append(name)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return {**facts(triton.compile(source, target=target, options=options)), "specialised": special}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for latent, heads, fp8 in SHAPES[name]:
            tiles = choose_tiles(heads, name.startswith("gfx"))
            common = {"LATENT": latent, "HEADS": heads, "Q_PIECE": 8, "WITH_LSE": True}
            constants = {
                **common,
                "PAGE_SIZE": 64,
                "KV_PIECE": 16 if fp8 else 8,
                "BLOCK_M": tiles.block_m,
                "BLOCK_N": tiles.block_n,
                "SPLIT_KEYS": 512,
                "FP8": fp8,
                "CAUSAL": True,
                "DIES": 8 if name.startswith("gfx") else 1,
            }
            options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
            found = compile_one(attend_latent, constants, target_of(name), **options)
            label = f"attend_latent {latent} {heads} heads{' FP8' if fp8 else ''}"
            print(json.dumps({"target": name, "kernel": label, **found}), flush=True)
        found = compile_one(
            join_splits, {**common, "MAX_SPLITS": MAX_SPLITS}, target_of(name), num_warps=4
        )
        print(json.dumps({"target": name, "kernel": "join_splits", **found}), flush=True)
