"""FP8 products of sm_100 on any GPU: what they refuse, which comes before a launch, and what a
launch says that fails."""

from __future__ import annotations

import pytest
import torch

from radix_kernels import _dispatch, _loader
from tests.kernel.gemm_cases import on_gpu

TOKENS = 16
COLUMNS = 48
K = 32


@pytest.fixture
def args(request):
    """Those of the binding's functions, by name in their order: products of ones."""
    if not on_gpu(request) or _loader.backend != "cuda":
        pytest.skip("these kernels are CUDA's")
    if not hasattr(_loader.bind, "fp8_scaled_mm_sm100"):
        pytest.skip("this library is built without CUTLASS, and so without these kernels")
    return {
        "mat_a": torch.ones(TOKENS, K, device="cuda").to(torch.float8_e4m3fn),
        "mat_b": torch.ones(COLUMNS, K, device="cuda").to(torch.float8_e4m3fn).t(),
        "scales_a": torch.ones(TOKENS, 1, device="cuda"),
        "scales_b": torch.ones(COLUMNS, device="cuda"),
        "bias": None,
        "gate": 0,
        "static_weight": False,
        "fast_accum": False,
        "out": torch.full((TOKENS, COLUMNS), 7, dtype=torch.bfloat16, device="cuda"),
    }


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("gate", lambda: 1, "fp8_scaled_mm: gate is 1, which Hopper's kernels alone have"),
        ("gate", lambda: 2, "fp8_scaled_mm: gate is 2"),
        (
            "scales_a",
            lambda: torch.ones(2 * TOKENS, 1, device="cuda")[::2],
            "scales_a has a step of 2 elements, sm_100 takes 1",
        ),
        (
            "scales_b",
            lambda: torch.ones(COLUMNS, 3, device="cuda")[:, 1],
            "scales_b has a step of 3 elements, sm_100 takes 1",
        ),
    ],
)
def test_what_it_refuses(name, value, text, args):
    args[name] = value()
    if name == "gate":  # a gated result has half the columns
        args["out"] = args["out"][:, : COLUMNS // 2].contiguous()
    with pytest.raises(NotImplementedError, match=text):
        _loader.bind.fp8_scaled_mm_sm100(*args.values())
    assert torch.all(args["out"] == 7)


def test_a_launch_that_fails(args):
    """It says why in CUDA's words, each time, and the error that CUDA keeps of it is no other
    product's."""
    hopper = getattr(_loader.bind, "fp8_scaled_mm", None)
    blackwell = _loader.bind.fp8_scaled_mm_sm100
    # The machine code of each is for that chip alone.
    pairs = {"sm_90": (hopper, blackwell), "sm_100": (blackwell, hopper)}
    own, foreign = pairs.get(_dispatch.isa(), (None, None))
    if own is None or foreign is None:
        pytest.skip("for Hopper and Blackwell, with the kernels of both in the library")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="fp8_scaled_mm: .*(kernel image|device function)"):
            foreign(*args.values())
    assert torch.all(args["out"] == 7)
    own(*args.values())
    assert torch.all(args["out"] == K)
