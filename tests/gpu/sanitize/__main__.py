"""Small shapes of the Hopper kernels for compute-sanitizer: each result is compared with the
definition.

    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize prefill decode

`tools/sanitize.sh` runs every family under memcheck and racecheck. A family is a function in this
package: rows and sizes that reach the borders of its tiles and each of its kernels, and no larger,
for racecheck slows a kernel a hundredfold. What no Hopper kernel runs is an error: neither Triton,
the reference nor cuBLAS is what is checked here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest import mock

import radix_kernels as rk
from radix_kernels import _dispatch
from tests.gpu.sanitize.attention import decode, mla, prefill
from tests.gpu.sanitize.persistent import persistent
from tests.gpu.sanitize.pointwise import moe, pointwise, quantization, step, stores
from tests.gpu.sanitize.products import (
    before_hopper,
    code_experts,
    experts,
    gemm,
    grouped,
    last_tiles,
    refill,
)
from tests.gpu.sanitize.quantized import quantized
from tests.gpu.sanitize.steps import steps
from tests.kernel.on_device import no_library_for

FAMILIES: dict[str, Callable[[], None]] = {
    "prefill": prefill,
    "decode": decode,
    "mla": mla,
    "stores": stores,
    "gemm": gemm,
    "last_tiles": last_tiles,
    "before_hopper": before_hopper,
    "grouped": grouped,
    "experts": experts,
    "code_experts": code_experts,
    "moe": moe,
    "pointwise": pointwise,
    "quantization": quantization,
    "quantized": quantized,
    "persistent": persistent,
    "refill": refill,
    "step": step,
    "steps": steps,
}


def main() -> None:
    why = no_library_for("cuda")
    if why:
        raise SystemExit(f"nothing to check: {why}")
    if _dispatch.isa() != "sm_90":
        raise SystemExit(
            f"nothing to check: the GPU is {_dispatch.isa()}, the kernels are for sm_90"
        )
    rk.set_fallback("error")
    with mock.patch.object(_dispatch, "triton_installed", return_value=False):
        for family in sys.argv[1:] or FAMILIES:
            FAMILIES[family]()


if __name__ == "__main__":
    main()
