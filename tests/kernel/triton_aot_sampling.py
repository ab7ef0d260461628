"""As `triton_aot`, for the draw: `python -m tests.kernel.triton_aot_sampling TARGET...`."""

from __future__ import annotations

import json
import sys

import triton
from triton.compiler import ASTSource

from radix_kernels.triton.sampling import BLOCK, NUM_WARPS
from radix_kernels.triton.sampling_kernel import draw_rows
from tests.kernel.triton_aot import facts, target_of

TYPES = {
    "logits": "*fp32",
    "temperatures": "*fp32",
    "top_ps": "*fp32",
    "min_ps": "*fp32",
    "top_ks": "*i32",
    "seeds": "*i64",
    "positions": "*i64",
    "out": "*i32",
}

if __name__ == "__main__":
    for target in sys.argv[1:]:
        constants = {"BLOCK": BLOCK}
        signature = {}
        attributes = {}
        for index, name in enumerate(draw_rows.arg_names):
            signature[name] = "constexpr" if name in constants else TYPES.get(name, "i32")
            if name in ("logits", "stride", "vocab"):  # a vocabulary that is a multiple of 16
                attributes[index,] = [["tt.divisibility", 16]]
        source = ASTSource(
            fn=draw_rows, signature=signature, constexprs=constants, attrs=attributes
        )
        compiled = triton.compile(
            source, target=target_of(target), options={"num_warps": NUM_WARPS}
        )
        print(json.dumps({"target": target, "kernel": "draw_rows", **facts(compiled)}), flush=True)
