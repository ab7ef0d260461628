"""Grouped products: the reference on the CPU, Triton in its interpreter, the chosen kernels with
`--device cuda`."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import FLOATS, assert_close, assert_same_bits, guarded, integers

FP8 = torch.float8_e4m3fn
FNUZ = torch.float8_e4m3fnuz
CODES = (FP8, FNUZ)
TOLERANCE = {torch.float32: (2e-6, 2e-5), torch.float16: (5e-4, 1e-3), torch.bfloat16: (4e-3, 8e-3)}
TRITON = importlib.util.find_spec("triton") is not None


def quantized(
    values: torch.Tensor, code: torch.dtype, rng: torch.Generator, *, dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """In FP8, with random scales for blocks of 128 along the last `dims` dimensions."""
    kept = values.ndim - dims
    shape = (*values.shape[:kept], *(-(-n // 128) for n in values.shape[kept:]))
    most = torch.finfo(code).max
    return (values * 40).clamp(-most, most).to(code), torch.rand(shape, generator=rng) * 0.02 + 0.01


def scaled(values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """In float64, times the scales of its blocks of 128."""
    wide = values.double()
    if scale is None:
        return wide
    full = scale.double()
    for dim, (size, count) in enumerate(zip(values.shape, scale.shape, strict=True)):
        if size != count:
            full = full.repeat_interleave(128, dim).narrow(dim, 0, size)
    return wide * full


def laid_out(counts: list[int]) -> torch.Tensor:
    """m_indices for so many rows of each group, each at a multiple of 128; a last group ends
    without padding."""
    parts = []
    for group, count in enumerate(counts):
        end = count if group == len(counts) - 1 else -(-count // 128) * 128
        parts.append(torch.full((end,), -1, dtype=torch.int32))
        parts[-1][:count] = group
    return torch.cat(parts)


def operands(
    lead: tuple[int, ...], experts: int, n: int, k: int, dtype: torch.dtype, rng: torch.Generator
):
    """x [*lead, k], weight [experts, n, k], and their scales."""
    x = torch.randn((*lead, k), generator=rng)
    weight = torch.randn((experts, n, k), generator=rng) / k**0.5
    if dtype not in CODES:
        return x.to(dtype), weight.to(dtype), None, None
    x, x_scale = quantized(x, dtype, rng, dims=1)
    weight, w_scale = quantized(weight, dtype, rng, dims=2)
    return x, weight, x_scale, w_scale


def poison(x: torch.Tensor, x_scale: torch.Tensor | None, rows: torch.Tensor) -> None:
    """NaN where nothing is to be read."""
    if x_scale is None:
        x[rows] = math.nan
    else:
        x.view(torch.uint8)[rows] = 0x7F if x.dtype == FP8 else 0x80
        x_scale[rows] = math.nan


def call(op: str, run: str, *args, out, **options):
    """By the public function, or by Triton's interpreter where there is no GPU."""
    if run == "public":
        return getattr(rk, op)(*args, out=out, **options)
    from radix_kernels import triton

    place = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight, groups = (t.to(place) for t in args)
    there = out.to(place)
    more = () if "masked" not in op else (options.get("expected_m", x.shape[1]),)
    scales = [
        None if options.get(n) is None else options[n].to(place)
        for n in ("x_scale", "weight_scale")
    ]
    getattr(triton, op)(x, weight, groups, *more, *scales, there)
    return out.copy_(there)


NO_TRITON = pytest.mark.skipif(not TRITON, reason="triton is not installed")
pytestmark = [pytest.mark.cover("values")]
if TRITON:
    pytestmark.append(pytest.mark.usefixtures("interpreter_widens_bfloat16"))


def tolerance(dtype: torch.dtype, run: str) -> tuple[float, float]:
    cut = run == "triton" and not torch.cuda.is_available() and dtype in (torch.bfloat16, *CODES)
    # The interpreter cuts float32 to bfloat16 where a chip rounds to the nearest.
    return (8e-3, 1.6e-2) if cut else TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])


# (rows of each group, n, k)
CONTIGUOUS = [([5], 24, 40), ([128, 3], 64, 128), ([0, 130, 0, 7], 136, 200), ([1, 1, 1], 8, 16)]
# From 65 rows a group on Hopper takes tiles of 128 rows, that end at a half or within one.
LARGE = [
    ([300, 0, 1, 64], 264, 400),
    ([65, 257, 0, 129], 520, 272),
    ([400, 0, 250, 300], 264, 400),
    ([65, 100], 208, 272),
]


def cases(small: list[tuple], large: list[tuple]) -> list[Any]:
    """Shapes and runs; Triton's interpreter takes the small ones."""
    return [
        *(pytest.param(shape, "public") for shape in [*small, *large]),
        *(pytest.param(shape, "triton", marks=NO_TRITON) for shape in small),
    ]


@pytest.mark.parametrize("dtype", [*FLOATS, *CODES], ids=str)
@pytest.mark.parametrize(("shape", "run"), cases(CONTIGUOUS, LARGE), ids=str)
def test_contiguous(shape, run, dtype, rng):
    counts, n, k = shape
    groups = laid_out(counts)
    x, weight, x_scale, w_scale = operands((len(groups),), len(counts), n, k, dtype, rng)
    padding = groups < 0
    poison(x, x_scale, padding)
    out = guarded((len(groups), n), torch.bfloat16 if dtype in CODES else dtype, gap=8)
    call(
        "m_grouped_gemm_contiguous",
        run,
        x,
        weight,
        groups,
        x_scale=x_scale,
        weight_scale=w_scale,
        out=out.view,
    )
    out.check()
    assert torch.isnan(out.view[padding]).all(), "padding was written"
    exact = torch.einsum(
        "mk,mnk->mn", scaled(x, x_scale), scaled(weight, w_scale)[groups.clamp(min=0).long()]
    )
    mine = ~padding
    assert_close("m_grouped_gemm_contiguous", out.view[mine], exact[mine], tolerance(dtype, run))
    wide = rk.reference.m_grouped_gemm_contiguous(
        x if dtype in CODES else x.double(), weight, groups, x_scale=x_scale, weight_scale=w_scale
    )
    assert_close("m_grouped_gemm_contiguous", wide[mine], exact[mine], (1e-12, 1e-11))


@pytest.mark.parametrize("run", ["public", pytest.param("triton", marks=NO_TRITON)])
def test_rows_of_a_group_that_is_not_there(run, rng):
    """They are padding: neither written nor looked up."""
    groups = laid_out([5, 128])
    groups[:128][groups[:128] < 0] = 2
    groups = torch.cat([groups, torch.full((128,), 2**30, dtype=torch.int32)])
    x, weight, _, _ = operands((len(groups),), 2, 24, 40, torch.float16, rng)
    padding = groups > 1
    poison(x, None, padding)
    out = guarded((len(groups), 24), torch.float16, gap=8)
    call("m_grouped_gemm_contiguous", run, x, weight, groups, out=out.view)
    out.check()
    assert torch.isnan(out.view[padding]).all(), "padding was written"
    exact = torch.einsum("mk,mnk->mn", x.double(), weight.double()[groups.clamp(max=1).long()])
    assert_close(
        "m_grouped_gemm_contiguous", out.view[~padding], exact[~padding], TOLERANCE[torch.float16]
    )


@pytest.mark.parametrize("run", ["public", pytest.param("triton", marks=NO_TRITON)])
def test_counts_below_zero_and_above_the_room(run, rng):
    x, weight, _, _ = operands((3, 20), 3, 16, 32, torch.float16, rng)
    out = guarded((3, 20, 16), torch.float16)
    call(
        "m_grouped_gemm_masked",
        run,
        x,
        weight,
        torch.tensor([-1, 20, 99], dtype=torch.int32),
        out=out.view,
    )
    out.check()
    assert torch.isnan(out.view[0]).all()
    exact = torch.einsum("emk,enk->emn", x.double(), weight.double())
    assert_close("m_grouped_gemm_masked", out.view[1:], exact[1:], TOLERANCE[torch.float16])


# (groups, most rows, rows expected, n, k)
MASKED = [(1, 1, 1, 16, 32), (3, 20, 9, 72, 128), (4, 70, 64, 136, 200), (2, 150, 150, 40, 72)]


@pytest.mark.parametrize("dtype", [*FLOATS, *CODES], ids=str)
@pytest.mark.parametrize(
    ("shape", "run"),
    cases(MASKED, [(5, 300, 200, 264, 400), (5, 300, 250, 264, 400), (3, 100, 100, 208, 272)]),
    ids=str,
)
def test_masked(shape, run, dtype, rng):
    experts, most, expected, n, k = shape
    counts = integers(0, most + 1, (experts,), rng).int()
    counts[0] = 0
    counts[-1] = most
    x, weight, x_scale, w_scale = operands((experts, most), experts, n, k, dtype, rng)
    behind = torch.arange(most) >= counts[:, None]
    poison(x, x_scale, behind)
    out = guarded((experts, most, n), torch.bfloat16 if dtype in CODES else dtype, gap=8)
    options = {"expected_m": expected, "x_scale": x_scale, "weight_scale": w_scale}
    call("m_grouped_gemm_masked", run, x, weight, counts, out=out.view, **options)
    out.check()
    assert torch.isnan(out.view[behind]).all(), "rows past a group's were written"
    exact = torch.einsum("emk,enk->emn", scaled(x, x_scale), scaled(weight, w_scale))
    assert_close("m_grouped_gemm_masked", out.view[~behind], exact[~behind], tolerance(dtype, run))
    wide = rk.reference.m_grouped_gemm_masked(
        x if dtype in CODES else x.double(), weight, counts, x_scale=x_scale, weight_scale=w_scale
    )
    assert_close("m_grouped_gemm_masked", wide[~behind], exact[~behind], (1e-12, 1e-11))


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_a_single_row_of_any_stride(dtype, rng):
    """A dimension of one element steps nowhere, so its stride says nothing."""
    x, weight, x_scale, w_scale = operands((1,), 2, 64, 128, dtype, rng)
    apart = torch.empty(2 * 129, dtype=dtype).as_strided((1, 128), (129, 1)).copy_(x)
    given = {} if x_scale is None else {"x_scale": x_scale, "weight_scale": w_scale}
    out = torch.empty(1, 64, dtype=torch.bfloat16)
    rk.m_grouped_gemm_contiguous(apart, weight, torch.ones(1, dtype=torch.int32), out=out, **given)
    expected = scaled(x, x_scale) @ scaled(weight, w_scale)[1].T
    assert_close("m_grouped_gemm_contiguous", out, expected, TOLERANCE[torch.bfloat16])


def test_the_hint_does_not_change_rows_that_are_there(rng):
    x, weight, _, _ = operands((2, 40), 2, 48, 64, torch.float16, rng)
    counts = torch.tensor([40, 13], dtype=torch.int32)
    exact = torch.einsum("emk,enk->emn", x.double(), weight.double())
    for hint in (0, 1, 40, 1000, None):
        out = rk.m_grouped_gemm_masked(x, weight, counts, expected_m=hint)
        assert_close("m_grouped_gemm_masked", out[0], exact[0], TOLERANCE[torch.float16])
        assert_close("m_grouped_gemm_masked", out[1, :13], exact[1, :13], TOLERANCE[torch.float16])


def test_a_hint_above_the_room_means_all_of_it(rng):
    x, weight, x_scale, w_scale = operands((2, 200), 2, 136, 128, FP8, rng)
    counts = torch.tensor([200, 70], dtype=torch.int32)
    whole, *others = (
        rk.m_grouped_gemm_masked(
            x, weight, counts, expected_m=hint, x_scale=x_scale, weight_scale=w_scale
        )
        for hint in (200, 201, 2**31 - 1, 2**31, 2**70)
    )
    for other in others:
        assert_same_bits(other[0], whole[0])
        assert_same_bits(other[1, :70], whole[1, :70])


def test_nothing_to_do(rng):
    x, weight, _, _ = operands((0,), 2, 8, 16, torch.float16, rng)
    out = rk.m_grouped_gemm_contiguous(x, weight, torch.zeros(0, dtype=torch.int32))
    assert out.shape == (0, 8)
    out = rk.m_grouped_gemm_masked(x.view(2, 0, 16), weight, torch.zeros(2, dtype=torch.int32))
    assert out.shape == (2, 0, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("n", [72, 520])
def test_a_row_has_the_same_bits_again_and_among_others(n, dtype, rng):
    groups = laid_out([100, 0, 260])
    x, weight, x_scale, w_scale = operands((len(groups),), 3, n, 272, dtype, rng)

    def run(rows: torch.Tensor) -> torch.Tensor:
        given = {} if x_scale is None else {"x_scale": x_scale[rows], "weight_scale": w_scale}
        out = torch.zeros(len(rows), n, dtype=torch.bfloat16)
        return rk.m_grouped_gemm_contiguous(x[rows], weight, groups[rows], out=out, **given)

    every = torch.arange(len(groups))
    both = run(every)
    assert_same_bits(run(every), both)
    assert_same_bits(run(every[128:]), both[128:])
    assert_same_bits(run(every[256:320]), both[256:320])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x, w, i: rk.m_grouped_gemm_contiguous(x.int(), w, i), TypeError, "x has dtype"),
        (lambda x, w, i: rk.m_grouped_gemm_contiguous(x, w.half(), i), TypeError, "weight"),
        (lambda x, w, i: rk.m_grouped_gemm_contiguous(x, w, i.long()), TypeError, "m_indices"),
        (lambda x, w, i: rk.m_grouped_gemm_contiguous(x, w, i[1:]), ValueError, "m_indices"),
        (lambda x, w, i: rk.m_grouped_gemm_contiguous(x[:, :8], w, i), ValueError, "rows of 8"),
        (lambda x, w, i: rk.m_grouped_gemm_contiguous(x, w.mT, i), ValueError, "rows of 16"),
        (lambda x, w, i: rk.m_grouped_gemm_contiguous(x, w, i, x_scale=x), ValueError, "x_scale"),
        (
            lambda x, w, i: rk.m_grouped_gemm_contiguous(x.to(FP8), w.to(FP8), i),
            ValueError,
            "x_scale",
        ),
        (lambda x, w, i: rk.m_grouped_gemm_contiguous(x, w, i, out=x), ValueError, "out"),
        (lambda x, w, i: rk.m_grouped_gemm_masked(x, w, i), ValueError, "x has 2 dimensions"),
        (lambda x, w, i: rk.m_grouped_gemm_masked(x[None], w, i[:1]), ValueError, "x has 1 groups"),
        (lambda x, w, i: rk.m_grouped_gemm_masked(x[:2, None], w, i), ValueError, "masked_m"),
        (
            lambda x, w, i: rk.m_grouped_gemm_masked(x[:2, None], w, i[:2], expected_m=-1),
            ValueError,
            "expected_m",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.zeros(4, 16), torch.zeros(2, 8, 16), torch.zeros(4, dtype=torch.int32))
