"""Quantization to INT8, alone and behind an activation or a norm: codes as the CPU's products."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import FLOATS, ROUNDED_ONCE, spread

SHAPES = [(0, 128), (1, 16), (3, 272), (2, 5, 384), (33, 1024), (3, 4112), (2, 16512), (2, 8320)]
POISON = -128  # no code is
# Around every border of the GPU's kernels: whole warps of two packs of 16 bytes a thread, the most
# of those, the most packs that a row may have in registers at all.
BORDERS = [
    (torch.bfloat16, (4, 512)),
    (torch.bfloat16, (4, 528)),
    (torch.float16, (4, 1024)),
    (torch.float16, (4, 1040)),
    (torch.bfloat16, (4, 16384)),
    (torch.bfloat16, (4, 16400)),
    (torch.float32, (4, 8192)),
    (torch.float32, (4, 8208)),
    (torch.float16, (4, 65536)),
    (torch.float16, (4, 65552)),
    (torch.float32, (4, 32768)),
    (torch.float32, (4, 32784)),
]
# More rows than a GPU holds at once in the kernel of few: of 8 multiprocessors (the executor's)
# and of 132.
MANY = [
    (torch.bfloat16, (35, 4112)),
    (torch.float16, (2111, 1040)),
    (torch.float32, (1101, 1040)),
    (torch.bfloat16, (2111, 1024)),
    (torch.bfloat16, (161, 14336)),
    (torch.bfloat16, (271, 8192)),
]


def room(x: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """For the result, in rows that something else keeps apart; none of it is a code."""
    *rows, last = x.shape
    width = width or last
    return torch.full((*rows, width + 16), POISON, dtype=torch.int8)[..., :width]


def gaps_are_whole(view: torch.Tensor) -> bool:
    """Whether nothing was written between the rows."""
    if not view.numel():
        return True
    *rows, width = view.shape
    everything = view.as_strided((*rows, width + 16), view.stride())
    return bool((everything[..., width:] == POISON).all())


def near(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bound: float) -> None:
    """`values` is the float64 truth, of which the op's own values may be `bound` off, and no more
    than that and half a code is what they stand for."""
    largest = values.abs().amax(-1, keepdim=True)
    assert scales.shape == largest.shape and scales.dtype == torch.float32
    if not values.numel():
        return
    assert ((scales.double() - largest / 127).abs() <= bound * largest / 127).all()
    error = (codes.double() * scales.double() - values).abs()
    assert (error <= (0.5 + 1e-4 + 127 * bound) * largest / 127).all()
    assert codes.abs().amax(-1).eq(127).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_per_token(dtype, shape, rng):
    x = spread(shape, dtype, rng, gap=16)
    out = room(x)
    scales = torch.full((*shape[:-1], 3), math.nan)
    q, s = rk.per_token_quant_int8(x, out=out, scales=scales[..., 1:2])
    assert q is out and gaps_are_whole(out)
    assert scales[..., ::2].isnan().all()
    codes, expected = rk.reference.quantize_rows(x.reshape(-1, shape[-1]), 0)
    assert torch.equal(q, codes.view(shape))
    assert torch.equal(s.flatten(), expected.flatten())
    near(x.double(), q, s, 1e-6)
    q, s = rk.per_token_quant_int8(x)
    assert torch.equal(q, codes.view(shape)) and s.shape == (*shape[:-1], 1)


@pytest.mark.parametrize(("dtype", "shape"), [*BORDERS, *MANY], ids=str)
def test_per_token_of_every_size(dtype, shape, rng):
    x = spread(shape, dtype, rng, gap=16)
    x[-1, -1] = math.inf
    x[0, 0] = 1.5 * x[0].abs().max()  # the row's scale, at one end and the other
    x[1, -1] = -1.5 * x[1].abs().max()
    out = room(x)
    scales = torch.full((shape[0], 3), POISON, dtype=torch.float32)
    rk.per_token_quant_int8(x, out=out, scales=scales[:, 1:2])
    assert gaps_are_whole(out) and scales[:, ::2].eq(POISON).all()
    codes, expected = rk.reference.quantize_rows(x, 0)
    assert torch.equal(out, codes)
    assert torch.equal(scales[:, 1].nan_to_num(nan=-1.0), expected.flatten().nan_to_num(nan=-1.0))
    assert scales[-1, 1].isnan() and not out[-1].any()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *MANY,
        (torch.bfloat16, (3, 32768)),
        (torch.bfloat16, (3, 32784)),
        (torch.float32, (3, 16384)),
        (torch.float32, (3, 16400)),
        (torch.float16, (37, 2064)),
    ],
    ids=str,
)
def test_silu_and_mul_of_every_size(dtype, shape, rng):
    rows, width = shape
    x = spread((rows, 2 * width), dtype, rng, gap=16)
    gate, up = x.double().chunk(2, dim=-1)
    out = room(x, width)
    q, s = rk.silu_and_mul_quant_int8(x, out=out)
    assert gaps_are_whole(out)
    near(gate / (1 + torch.exp(-gate)) * up, q, s, 4e-6)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *MANY,
        (torch.bfloat16, (3, 4096)),
        (torch.float16, (533, 4096)),
        (torch.bfloat16, (19, 16384)),
        (torch.float32, (149, 8192)),
    ],
    ids=str,
)
def test_rmsnorm_of_every_size(dtype, shape, add, rng):
    x = spread(shape, dtype, rng, gap=16)
    w = spread(shape[-1:], dtype, rng)
    residual = spread(shape, dtype, rng, gap=16) if add else None
    total = x.float() + residual.float() if add else x
    out = room(x)
    scales = torch.full((shape[0], 1), math.nan)
    rk.rmsnorm_quant_int8(x, w, 1e-5, residual=residual, out=out, scales=scales)
    assert gaps_are_whole(out)
    if add:
        assert torch.equal(residual, total.to(dtype))
    wide = total.double()
    values = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * w.double()
    near(values, out, scales, 4e-6)


@pytest.mark.parametrize("uneven", ["input", "out", "scales"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_of_uneven_steps(dtype, uneven, rng):
    """Rows that no single step leads through, of one tensor at a time."""
    whole = spread((5, 4, 1040), dtype, rng)
    x = whole[:, :3] if uneven == "input" else whole[:, :3].contiguous()
    buffer = torch.full((5, 4, 1040), POISON, dtype=torch.int8)
    out = buffer[:, :3] if uneven == "out" else torch.full((5, 3, 1040), POISON, dtype=torch.int8)
    room_for_scales = torch.full((5, 4, 1), math.nan)
    scales = room_for_scales[:, :3] if uneven == "scales" else torch.full((5, 3, 1), math.nan)
    rk.per_token_quant_int8(x, out=out, scales=scales)
    codes, expected = rk.reference.quantize_rows(x.reshape(-1, 1040), 0)
    assert torch.equal(out.reshape(-1, 1040), codes)
    assert torch.equal(scales.flatten(), expected.flatten())
    w = spread((1040,), dtype, rng)
    residual = spread((5, 4, 1040), dtype, rng)[:, :3]
    total = (x.float() + residual.float()).double()
    values = total / torch.sqrt(total.square().mean(-1, keepdim=True) + 1e-5) * w.double()
    rk.rmsnorm_quant_int8(x, w, 1e-5, residual=residual, out=out, scales=scales)
    assert torch.equal(residual, total.to(dtype))
    near(values, out, scales, 4e-6)
    assert buffer[:, 3].eq(POISON).all() and room_for_scales[:, 3].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 256), (3, 288), (2, 3, 768), (19, 4096), (2, 33024)], ids=str
)
def test_silu_and_mul(dtype, shape, rng):
    x = spread(shape, dtype, rng, gap=16)
    gate, up = x.double().chunk(2, dim=-1)
    out = room(x, shape[-1] // 2)
    q, s = rk.silu_and_mul_quant_int8(x, out=out)
    assert q is out and gaps_are_whole(out)
    near(gate / (1 + torch.exp(-gate)) * up, q, s, 4e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 128), (1, 16), (2, 3, 384), (9, 4096), (3, 8320), (2, 16400)], ids=str
)
@pytest.mark.parametrize("add", [False, True])
def test_rmsnorm(dtype, shape, add, rng):
    x = spread(shape, dtype, rng, gap=16)
    w = spread(shape[-1:], dtype if shape[0] != 9 else torch.float32, rng)
    residual = spread(shape, dtype, rng, gap=16) if add else None
    total = x.float() + residual.float() if add else x
    before = x.clone()
    out = room(x)
    q, s = rk.rmsnorm_quant_int8(x, w, 1e-5, residual=residual, out=out)
    assert q is out and gaps_are_whole(out)
    if add:
        assert torch.equal(residual, total.to(dtype))
    assert torch.equal(x, before)
    wide = total.double()
    near(wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * w.double(), q, s, 4e-6)


@pytest.mark.parametrize("width", [32, 4096, 20480])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_and_what_is_not_finite(dtype, width, rng):
    """As `linear` has it for packed weights on the CPU: scale 0, or NaN; codes of 0."""
    x = spread((6, width), dtype, rng)
    x[0] = 0
    x[1, 7] = math.nan
    x[2, width - 1] = math.inf
    x[3, 0] = -math.inf
    x[4] = 0
    x[4, 5] = torch.finfo(dtype).tiny
    q, s = rk.per_token_quant_int8(x)
    codes, expected = rk.reference.quantize_rows(x, 0)
    assert torch.equal(q, codes)
    assert torch.equal(s.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    assert s[0] == 0 and s[1:4].isnan().all() and not q[:4].any()
    assert q[5].abs().max() == 127


def test_every_rounding():
    """All codes, the middles between neighbours (to even) and what lies beside them."""
    codes = torch.arange(-127, 128, dtype=torch.float64)
    middles = codes[:-1] + 0.5
    x = torch.cat([codes, middles, middles * (1 - 1e-6), middles * (1 + 1e-6)]).float()
    x = torch.cat([x, torch.zeros(-len(x) % 16)]).reshape(1, -1)
    q, s = rk.per_token_quant_int8(x)
    assert float(s) == 1
    assert torch.equal(q.float(), x.round())


def test_products_of_quantized_rows_are_products(rng):
    x = spread((33, 512), torch.bfloat16, rng)
    w = spread((64, 512), torch.bfloat16, rng)
    a, sa = rk.per_token_quant_int8(x)
    b, sb = rk.per_token_quant_int8(w)
    got = rk.int8_scaled_mm(a, b.t(), sa, sb.t())
    expected = x.double() @ w.double().t()
    assert (got.double() - expected).norm() / expected.norm() < 0.02


@pytest.mark.cpu_only
def test_reference_is_the_same_op(rng):
    x = spread((7, 256), torch.float32, rng)
    near(x.double(), *rk.reference.per_token_quant_int8(x.double()), 1e-6)
    gate, up = x.double().chunk(2, dim=-1)
    values = gate / (1 + torch.exp(-gate)) * up
    near(values, *rk.reference.silu_and_mul_quant_int8(x.double()), ROUNDED_ONCE[torch.float32][1])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: rk.per_token_quant_int8(x[:, :24]), ValueError, "input"),
        (lambda x: rk.per_token_quant_int8(x.int()), TypeError, "input"),
        (
            lambda x: rk.per_token_quant_int8(x, out=torch.empty(2, 64, dtype=torch.int8)),
            ValueError,
            "out",
        ),
        (lambda x: rk.per_token_quant_int8(x, out=torch.empty(2, 128)), TypeError, "out"),
        (
            lambda x: rk.per_token_quant_int8(x, out=torch.empty(128, 2, dtype=torch.int8).t()),
            ValueError,
            "out",
        ),
        (lambda x: rk.per_token_quant_int8(x, scales=torch.empty(2, 2)), ValueError, "scales"),
        (lambda x: rk.per_token_quant_int8(x, scales=torch.ones(2, 1).int()), TypeError, "scales"),
        (lambda x: rk.silu_and_mul_quant_int8(x[:, :16]), ValueError, "input"),
        (lambda x: rk.rmsnorm_quant_int8(x, torch.ones(64)), ValueError, "weight"),
        (lambda x: rk.rmsnorm_quant_int8(x, torch.ones(128).half()), TypeError, "weight"),
        (
            lambda x: rk.rmsnorm_quant_int8(x, torch.ones(128), residual=torch.ones(2, 64)),
            ValueError,
            "residual",
        ),
        (
            lambda x: rk.per_token_quant_int8(torch.ones(2, 132)[:, 1:129]),
            ValueError,
            "input.*16 bytes",
        ),
    ],
)
def test_errors_name_the_argument(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.ones(2, 128))
