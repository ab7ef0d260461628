"""Products with fused ends and FP8 products: what is refused, on a CPU as by the native kernels."""

from __future__ import annotations

import pytest
import torch

import radix_kernels as rk


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"mat_a": torch.ones(2, 32)}, TypeError, "mat_a"),
        ({"mat_b": torch.ones(32, 16)}, TypeError, "mat_b"),
        ({"mat_b": torch.ones(32, 16).to(torch.float8_e4m3fn)}, ValueError, "column-major"),
        ({"mat_b": torch.ones(16, 48).to(torch.float8_e4m3fn).t()}, ValueError, "mat_b"),
        ({"mat_b": torch.ones(15, 32).to(torch.float8_e4m3fn).t()}, ValueError, "mat_b"),
        ({"scales_a": torch.ones(3)}, ValueError, "scales_a"),
        ({"scales_b": torch.ones(2, 8)}, ValueError, "scales_b"),
        ({"scales_b": torch.ones(16).double()}, TypeError, "scales_b"),
        ({"out": torch.ones(2, 17).bfloat16()}, ValueError, "out"),
        ({"out": torch.ones(2, 16)}, TypeError, "out"),
        ({"out_dtype": "float32"}, TypeError, "dtype"),
        ({"out_dtype": "float16", "out": torch.ones(2, 16).bfloat16()}, TypeError, "out"),
        ({"bias": torch.ones(15).bfloat16()}, ValueError, "bias"),
        ({"bias": torch.ones(16).double()}, TypeError, "bias"),
        ({"bias": torch.ones(16).half()}, TypeError, "bias"),
        ({"bias": torch.ones(32).bfloat16()[::2]}, ValueError, "bias"),
        (
            {"mat_a": torch.ones(2, 48).to(torch.float8_e4m3fn)[:, 1:33]},
            ValueError,
            "mat_a.*16 bytes",
        ),
        (
            {"mat_a": torch.ones(2, 40).to(torch.float8_e4m3fn)[:, :32]},
            ValueError,
            "mat_a.*16 bytes",
        ),
        (
            {"mat_b": torch.ones(16, 40).to(torch.float8_e4m3fn)[:, :32].t()},
            ValueError,
            "mat_b.*16 bytes",
        ),
        ({"mat_a": torch.ones(32).to(torch.float8_e4m3fn)}, ValueError, "mat_a"),
        ({"mat_b": torch.ones(1, 32, 16).to(torch.float8_e4m3fn)}, ValueError, "mat_b"),
        ({"out": torch.ones(16, 2).bfloat16().t()}, ValueError, "out"),
        ({"out": torch.ones(2, 20).bfloat16()[:, :16]}, ValueError, "out.*16 bytes"),
    ],
)
def test_errors_name_the_argument(change, error, text):
    fp8_ones = torch.ones(16, 32).to(torch.float8_e4m3fn)
    args = {
        "mat_a": fp8_ones[:2],
        "mat_b": fp8_ones.t(),
        "scales_a": torch.ones(2),
        "scales_b": torch.ones(16),
    } | change
    with pytest.raises(error, match=text):
        rk.fp8_scaled_mm(**args)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"scales_a": torch.ones(2, 1).half()}, TypeError, "scales_a"),
        ({"scales_a": torch.ones(2)}, ValueError, "scales_a"),
        ({"scales_b": torch.ones(1, 2).double()}, TypeError, "scales_b"),
        ({"scales_b": torch.ones(2, 2)}, ValueError, "scales_b"),
        ({"out": torch.ones(256, 2).bfloat16().t()}, ValueError, "out"),
    ],
)
def test_errors_of_block_scales(change, error, text):
    a = torch.ones(2, 128).to(torch.float8_e4m3fn)
    b = torch.ones(256, 128).to(torch.float8_e4m3fn).t()
    args = {
        "mat_a": a,
        "mat_b": b,
        "scales_a": torch.ones(2, 1),
        "scales_b": torch.ones(2, 1).t(),
    } | change
    with pytest.raises(error, match=text):
        rk.fp8_blockwise_scaled_mm(**args)


def test_row_major_block_scales_are_refused():
    a = torch.ones(2, 256).to(torch.float8_e4m3fn)
    b = torch.ones(256, 256).to(torch.float8_e4m3fn).t()
    with pytest.raises(ValueError, match="scales_b is not column-major"):
        rk.fp8_blockwise_scaled_mm(a, b, torch.ones(2, 2), torch.ones(2, 2))


def test_errors_of_the_batched_product():
    x = torch.ones(2, 16, 16).to(torch.float8_e4m3fn)
    one = torch.ones(1)
    for a, b, text in (
        (x[0], x.mT, "A has 2"),
        (x, x[0].t(), "B has 2"),
        (x, x, "B.*column-major"),
        (x[:1], x.mT, "B"),
    ):
        with pytest.raises(ValueError, match=text):
            rk.bmm_fp8(a, b, one, one)
    with pytest.raises(ValueError, match="out"):
        rk.bmm_fp8(x, x.mT, one, one, out=torch.empty(2, 16, 24, dtype=torch.bfloat16)[..., :16])


def test_errors_of_the_fused_product():
    x = torch.ones(2, 8).bfloat16()
    w = torch.ones(6, 8).bfloat16()
    with pytest.raises(ValueError, match="weight"):
        rk.linear_silu_and_mul(x, w[:5])
    with pytest.raises(ValueError, match="x"):
        rk.linear_silu_and_mul(x[:, :7], w)
    with pytest.raises(ValueError, match="out"):
        rk.linear_silu_and_mul(x, w, out=torch.ones(2, 4).bfloat16())
    with pytest.raises(ValueError, match="residual"):
        rk.linear(x, w, residual=torch.ones(2, 5).bfloat16())
    with pytest.raises(TypeError, match="residual"):
        rk.linear(x, rk.pack_weight(w), residual=torch.ones(2, 6))
