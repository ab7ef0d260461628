"""Quantization to FP8: every scale, and results within what float32's rounding allows."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import (
    FLOATS,
    FP8,
    FP8_CODES,
    FP8_MAX,
    FP8_NAN,
    FP8_SMALLEST,
    spread,
)

SHAPES = [(0, 128), (1, 128), (3, 256), (2, 5, 384), (33, 1024), (2, 8320)]


def fp8_like(x: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """Room for the result, full of NaN, in rows that more NaN keeps apart."""
    *rows, last = x.shape
    width = width or last
    buffer = torch.full((*rows, width + 16), FP8_NAN, dtype=torch.uint8)
    return buffer.view(FP8)[..., :width]


def check(values: torch.Tensor, got: torch.Tensor, scales: torch.Tensor, group: int | None) -> None:
    """`values` is the float64 truth; a result may be the neighbour where the truth is within 1e-6
    of the border."""
    groups = values.unflatten(-1, (-1, group or values.shape[-1]))
    expected = groups.abs().amax(-1).clamp(min=1e-10) / FP8_MAX
    assert scales.shape == expected.shape and scales.dtype == torch.float32
    if not values.numel():
        return
    assert ((scales.double() - expected).abs() <= 1e-6 * expected).all()
    exact = groups / scales.double().unsqueeze(-1)
    kept = got.double().unflatten(-1, (-1, groups.shape[-1]))
    assert not kept.isnan().any()
    low, high = (
        (exact * factor).clamp(-FP8_MAX, FP8_MAX).float().to(FP8).double()
        for factor in (1 - 1e-5, 1 + 1e-5)
    )
    near = (kept >= torch.minimum(low, high)) & (kept <= torch.maximum(low, high))
    tiny = (kept - exact).abs() <= FP8_SMALLEST / 2 * 1.001
    assert (near | tiny).all(), (kept - exact)[~(near | tiny)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("group", [None, 64, 128])
def test_per_token(dtype, shape, group, rng):
    x = spread(shape, dtype, rng, gap=16)
    out = fp8_like(x)
    if group is None:
        q, scales = rk.per_token_quant_fp8(x, out=out)
    else:
        q, scales = rk.per_token_group_quant(x, group, out=out)
    assert q is out
    check(x.double(), q, scales, group)


# Around the borders of the GPU's kernels of whole rows, and more rows than its kernel of few holds
# at once: of 8 multiprocessors (the executor's) and of 132.
ROWS = [
    (torch.bfloat16, (3, 16384)),
    (torch.bfloat16, (3, 16400)),
    (torch.float32, (3, 8208)),
    (torch.float16, (2, 65536)),
    (torch.float32, (2, 32784)),
    (torch.bfloat16, (35, 4112)),
    (torch.float16, (2111, 1040)),
    (torch.float32, (1101, 1040)),
    (torch.bfloat16, (161, 14336)),
]


@pytest.mark.parametrize(("dtype", "shape"), ROWS, ids=str)
def test_whole_rows_of_every_size(dtype, shape, rng):
    x = spread(shape, dtype, rng, gap=16)
    q, scales = rk.per_token_quant_fp8(x, out=fp8_like(x))
    check(x.double(), q, scales, None)
    gate = x.double()[:, : shape[1] // 32 * 16]
    up = x.double()[:, shape[1] // 32 * 16 :][:, : gate.shape[1]]
    both = x[:, : 2 * gate.shape[1]]
    q, scales = rk.silu_and_mul_quant_fp8(both, None, out=fp8_like(both, gate.shape[1]))
    check(gate / (1 + torch.exp(-gate)) * up, q, scales, None)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("shape", [(533, 4096), (149, 8192), (19, 16384)], ids=str)
def test_many_norms(shape, group, add, rng):
    x = spread(shape, torch.bfloat16, rng)
    w = spread(shape[-1:], torch.bfloat16, rng)
    residual = spread(shape, torch.bfloat16, rng) if add else None
    wide = (x.float() + residual.float() if add else x).double()
    q, scales = rk.rmsnorm_quant_fp8(x, w, 1e-5, group, residual=residual, out=fp8_like(x))
    values = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * w.double()
    check(values, q, scales, group)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group", [None, 64, 128])
def test_column_major_scales(dtype, group, rng):
    x = spread((37, 512), dtype, rng)
    plain = rk.silu_and_mul_quant_fp8(x, group)
    turned = rk.silu_and_mul_quant_fp8(x, group, column_major_scales=True)
    assert turned[1].stride() == (1, 37)
    assert torch.equal(turned[1], plain[1])
    assert torch.equal(turned[0].view(torch.uint8), plain[0].view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(0, 256), (3, 256), (2, 3, 768), (19, 4096)], ids=str)
@pytest.mark.parametrize("group", [None, 64, 128])
def test_silu_and_mul_quant(dtype, shape, group, rng):
    x = spread(shape, dtype, rng, gap=16)
    gate, up = x.double().chunk(2, dim=-1)
    out = fp8_like(x, shape[-1] // 2)
    q, scales = rk.silu_and_mul_quant_fp8(x, group, out=out)
    assert q is out
    check(gate / (1 + torch.exp(-gate)) * up, q, scales, group)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (2, 3, 384), (9, 4096), (3, 8320)], ids=str)
@pytest.mark.parametrize("group", [None, 64, 128])
@pytest.mark.parametrize("add", [False, True])
def test_rmsnorm_quant(dtype, shape, group, add, rng):
    x = spread(shape, dtype, rng, gap=16)
    w = spread(shape[-1:], dtype if shape[0] != 9 else torch.float32, rng)
    residual = spread(shape, dtype, rng, gap=16) if add else None
    total = x.float() + residual.float() if add else x
    before = x.clone()
    q, scales = rk.rmsnorm_quant_fp8(x, w, 1e-5, group, residual=residual, out=fp8_like(x))
    if add:
        assert torch.equal(residual, total.to(dtype))
    assert torch.equal(x, before)
    wide = total.double()
    check(
        wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * w.double(),
        q,
        scales,
        group,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(0, 128), (1, 16), (5, 48), (300, 1024)], ids=str)
def test_per_tensor(dtype, shape, rng):
    x = spread(shape, dtype, rng, gap=16)
    q, scale = rk.per_tensor_quant_fp8(x, out=fp8_like(x))
    largest = float(x.double().abs().max()) if x.numel() else 0.0
    assert scale.shape == (1,)
    assert float(scale) == pytest.approx(max(largest, 1e-10) / FP8_MAX, rel=1e-6)
    given = torch.tensor([0.37])
    q, scale = rk.per_tensor_quant_fp8(x, given, out=fp8_like(x))
    assert scale is given
    exact = (x.double() / 0.37).clamp(-FP8_MAX, FP8_MAX)
    if x.numel():
        assert (
            (q.double() - exact).abs() <= exact.abs() * (2.0**-4 + 1e-5) + FP8_SMALLEST / 2 * 1.001
        ).all()


def test_zeros_and_extremes():
    x = torch.zeros(3, 128)
    x[1, 5] = 3e38
    x[2] = torch.linspace(-1, 1, 128)
    q, scales = rk.per_token_group_quant(x)
    assert float(scales[0]) == pytest.approx(1e-10 / FP8_MAX, rel=1e-6)
    assert not q[0].float().any()
    assert q[1, 5].float() == FP8_MAX and q[1].float().abs().sum() == FP8_MAX
    assert q[2, 0].float() == -FP8_MAX and q[2, -1].float() == FP8_MAX


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [1e-6, 0.05, 1.0, 7.0])
def test_a_given_scale_and_quotients_beyond_float32(dtype, scale):
    """They are the largest number, as every other quotient that is too large; NaN stays NaN."""
    most = torch.finfo(dtype).max
    x = torch.tensor([[math.inf, -math.inf, math.nan, most, -most, 1.0, -scale, 0.0] * 2]).to(dtype)
    q, _ = rk.per_tensor_quant_fp8(x, torch.tensor([scale]))
    largest = torch.finfo(q.dtype).max
    expected = (x.float() / torch.tensor(scale)).clamp(-largest, largest).to(q.dtype)
    assert expected[0, :5].float().nan_to_num(nan=0.0).tolist() == [
        largest,
        -largest,
        0,
        largest,
        -largest,
    ]
    assert torch.equal(q.float().nan_to_num(nan=-1.0), expected.float().nan_to_num(nan=-1.0))


def test_every_rounding():
    """All e4m3 numbers, the middles between neighbours (to even) and what lies beside them."""
    numbers = torch.arange(0, FP8_CODES, dtype=torch.uint8).view(FP8).double()
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, middles, middles * (1 - 1e-6), middles * (1 + 1e-6)]).float()
    x = torch.cat([x, -x, torch.zeros(-len(x) * 2 % 16)]).reshape(1, -1)
    q, _ = rk.per_tensor_quant_fp8(x, torch.tensor([1.0]))
    assert torch.equal(q.float(), x.to(FP8).float())


def test_nan_stays_in_its_group(rng):
    x = spread((4, 256), torch.bfloat16, rng)
    clean, _ = rk.per_token_group_quant(x)
    x[2, 130] = math.nan
    q, _ = rk.per_token_group_quant(x)
    assert q[2, 130].float().isnan()
    keep = torch.ones(4, 256, dtype=torch.bool)
    keep[2, 128:] = False
    assert torch.equal(q.view(torch.uint8)[keep], clean.view(torch.uint8)[keep])


def test_quantized_values_stand_for_the_input(rng):
    x = spread((16, 512), torch.bfloat16, rng)
    q, scales = rk.per_token_group_quant(x)
    back = q.double() * scales.double().repeat_interleave(128, -1)
    assert ((back - x.double()).norm() / x.double().norm()) < 0.04


@pytest.mark.cpu_only
def test_reference_is_the_same_op(rng):
    x = spread((7, 256), torch.float32, rng)
    q, scales = rk.reference.per_token_group_quant(x.double())
    check(x.double(), q, scales, 128)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: rk.per_token_group_quant(x, 96), ValueError, "group_size"),
        (lambda x: rk.per_token_group_quant(x[:, :96], 64), ValueError, "groups"),
        (lambda x: rk.per_token_group_quant(x.int()), TypeError, "input"),
        (lambda x: rk.per_token_group_quant(x, out=torch.empty(2, 64).to(FP8)), ValueError, "out"),
        (lambda x: rk.per_token_group_quant(x, out=torch.empty(2, 128)), TypeError, "out"),
        (lambda x: rk.per_token_group_quant(x, scales=torch.empty(2, 2)), ValueError, "scales"),
        (
            lambda x: rk.per_token_quant_fp8(x, scales=torch.empty(2, 1).double()),
            TypeError,
            "scales",
        ),
        (lambda x: rk.per_tensor_quant_fp8(x, torch.ones(2)), ValueError, "scale"),
        (lambda x: rk.rmsnorm_quant_fp8(x, torch.ones(64)), ValueError, "weight"),
        (
            lambda x: rk.rmsnorm_quant_fp8(x, torch.ones(128), residual=torch.ones(2, 64)),
            ValueError,
            "residual",
        ),
        (
            lambda x: rk.rmsnorm_quant_fp8(x, torch.ones(128), residual=torch.ones(128, 2).t()),
            ValueError,
            "residual",
        ),
        (lambda x: rk.rmsnorm_quant_fp8(x, torch.ones(128).int()), TypeError, "weight"),
        (lambda x: rk.rmsnorm_quant_fp8(x, torch.ones(128).half()), TypeError, "weight"),
        (lambda x: rk.rmsnorm_quant_fp8(x, torch.ones(256)[::2]), ValueError, "weight"),
        (
            lambda x: rk.per_token_group_quant(torch.ones(2, 130)[:, :128]),
            ValueError,
            "input.*16 bytes",
        ),
        (
            lambda x: rk.per_token_group_quant(torch.ones(2, 132)[:, 1:129]),
            ValueError,
            "input.*16 bytes",
        ),
        (
            lambda x: rk.per_token_group_quant(x, out=torch.empty(128, 2).to(FP8).t()),
            ValueError,
            "out",
        ),
        (
            lambda x: rk.silu_and_mul_quant_fp8(x, 64, out=torch.empty(2, 128).to(FP8)[:, ::2]),
            ValueError,
            "out",
        ),
        (
            lambda x: rk.per_token_group_quant(
                x, column_major_scales=True, scales=torch.empty(2, 1)
            ),
            ValueError,
            "column_major_scales",
        ),
    ],
)
def test_errors_name_the_argument(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.ones(2, 128))
