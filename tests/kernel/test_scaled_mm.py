"""INT8 and FP8 products for chips beside Hopper: which chip runs which kernel, the epilogue on the
CPU, and on a GPU the kernels, whatever chip it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _dispatch, _loader
from tests.kernel import gpu_objects
from tests.kernel.forced_chip import forced_chip
from tests.kernel.gemm_cases import (
    FP8,
    HALVES,
    INT8_KINDS,
    column_sums,
    exact,
    fp8,
    int8,
    int8_operands,
    on_gpu,
    scales,
    zero_points,
)  # fmt: skip
from tests.kernel.helpers import (
    ROUNDED_ONCE,
    assert_close,
    assert_same_bits,
    distant,
    guarded,
    spread,
)

MOST = 131056  # columns of mat_a in INT8


# ------------------------------------------------------------------ on the CPU


def test_the_epilogue(tmp_path):
    """A lane after the other: what is stored where, and that nothing else is."""
    assert gpu_objects.run_emulated("scaled_mm", tmp_path) == "116640\n"


class OnGpu:
    """What the dispatch asks of a tensor."""

    class device:
        type = "cuda"

    def __dlpack_device__(self):
        return 2, 0


@pytest.fixture
def library(monkeypatch):
    """make(isa, names) -> a CUDA library with these functions, on a GPU of that architecture."""
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: False)

    def make(isa, *names):
        found = SimpleNamespace(isa=isa, **{name: object() for name in names})
        monkeypatch.setattr(_loader, "bind", found)
        monkeypatch.setattr(_loader, "backend", "cuda")
        rk.set_fallback("error")
        return found

    yield make
    monkeypatch.undo()
    rk.set_fallback("warn")


@pytest.mark.parametrize(
    ("isa", "kernels"),
    [
        ("sm_75", {}),
        ("sm_80", {"int8_scaled_mm": "int8_scaled_mm_sm80"}),
        ("sm_86", {"int8_scaled_mm": "int8_scaled_mm_sm80"}),
        ("sm_87", {"int8_scaled_mm": "int8_scaled_mm_sm80"}),
        (
            "sm_89",
            {"int8_scaled_mm": "int8_scaled_mm_sm80", "fp8_scaled_mm": "fp8_scaled_mm_sm89"},
        ),
        ("sm_90", {"int8_scaled_mm": "int8_scaled_mm", "fp8_scaled_mm": "fp8_scaled_mm"}),
        ("sm_100", {"fp8_scaled_mm": "fp8_scaled_mm_sm100"}),
        ("sm_120", {}),
        ("no device", {}),
    ],
)
@pytest.mark.cpu_only
def test_the_kernel_of_a_chip(library, isa, kernels):
    cutlass = ("int8_scaled_mm_sm80", "fp8_scaled_mm_sm89", "fp8_scaled_mm_sm100")
    found = library(isa, "int8_scaled_mm", "fp8_scaled_mm", *cutlass)
    for op in ("int8_scaled_mm", "fp8_scaled_mm"):
        impl, why = _dispatch.describe(op, "cuda", "int8")
        if op in kernels:
            run = _dispatch.native(op, OnGpu())
            assert run is getattr(found, kernels[op])
            assert _dispatch._is_bound(op, run)
            assert (impl, why) == (f"cuda:{isa}", "native kernel")
            continue
        with pytest.raises(RuntimeError, match=f"{op} for sm_90, sm_8.* only"):
            _dispatch.native(op, OnGpu())
        assert impl == "reference"


@pytest.mark.cpu_only
def test_a_library_without_cutlass(library):
    library("sm_89", "int8_scaled_mm", "fp8_scaled_mm")
    with pytest.raises(RuntimeError, match="int8_scaled_mm for sm_90 only"):
        _dispatch.native("int8_scaled_mm", OnGpu())
    found = library("sm_90", "int8_scaled_mm", "fp8_scaled_mm")
    assert _dispatch.native("int8_scaled_mm", OnGpu()) is found.int8_scaled_mm


@pytest.mark.cpu_only
def test_what_the_kernel_refuses_is_tritons(library, monkeypatch):
    asked = []

    def refuse(*args):
        asked.append(args)
        raise NotImplementedError("too many")

    def portable(*args):
        asked.append("triton")

    found = library("sm_80", "int8_scaled_mm")
    found.int8_scaled_mm_sm80 = refuse
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: True)
    monkeypatch.setattr(_dispatch, "triton", SimpleNamespace(int8_scaled_mm=portable))
    is_bound = []

    def call(run, bound):
        is_bound.append(bound)
        run(1)

    assert _dispatch.attempt("int8_scaled_mm", OnGpu(), call)
    assert asked == [(1,), "triton"] and is_bound == [True, False]


@pytest.mark.cpu_only
@pytest.mark.parametrize("ops", [("int8_scaled_mm",), ("int8_scaled_mm", "fp8_scaled_mm")])
def test_a_forced_chip_leaves_nothing_behind(library, ops):
    """Neither where its body fails, nor where it finds no kernel itself (FP8's)."""
    found = library("sm_90", "int8_scaled_mm", "int8_scaled_mm_sm80")
    rk.set_fallback("reference")
    assert _dispatch.native("int8_scaled_mm", OnGpu()) is found.int8_scaled_mm
    with pytest.raises(AssertionError, match="body" if len(ops) == 1 else "fp8_scaled_mm"):
        with forced_chip("sm_89", *ops):
            assert rk.get_fallback() == "error"
            assert _dispatch.native("int8_scaled_mm", OnGpu()) is found.int8_scaled_mm_sm80
            raise AssertionError("body")
    assert rk.get_fallback() == "reference" and _dispatch.isa() == "sm_90"
    assert _dispatch.native("int8_scaled_mm", OnGpu()) is found.int8_scaled_mm


# ------------------------------------------------------------------ on a GPU


@pytest.fixture
def as_ada(request):
    """The kernels of Ada, whatever the GPU is."""
    if not on_gpu(request) or _loader.backend != "cuda":
        pytest.skip("these kernels are CUDA's")
    if not hasattr(_loader.bind, "fp8_scaled_mm_sm89"):
        pytest.skip("this library is built without CUTLASS, and so without these kernels")
    with forced_chip("sm_89", "int8_scaled_mm", "fp8_scaled_mm"):
        yield


TOKENS = [0, 1, 9, 16, 17, 33, 63, 64, 65, 127, 128, 129, 300]
SHAPES = [(16, 16), (48, 272), (112, 144), (272, 1040), (1056, 128), (2128, 1040)]


@pytest.mark.combinations(
    kind=INT8_KINDS,
    tokens=TOKENS,
    shape=SHAPES,
    dtype=HALVES,
)
def test_int8(dtype, shape, tokens, kind, rng, as_ada):
    a, b, sa, sb, bias, azp = int8_operands(dtype, shape, tokens, kind, rng)
    n = shape[0]
    options = {} if azp is None else {"azp": azp, "b_sums": column_sums(b)}
    out = guarded((tokens, n), dtype, gap=8)
    assert rk.int8_scaled_mm(a, b, sa, sb, dtype, bias, out=out.view, **options) is out.view
    out.check()
    expected = exact(a, b, sa, sb, bias, azp)
    assert_close("int8_scaled_mm", out.view, expected, ROUNDED_ONCE[dtype])
    again = rk.int8_scaled_mm(a, b, sa, sb, dtype, bias, static_weight=True, **options)
    assert_same_bits(again, out.view)


@pytest.mark.combinations(
    kind=["tensor", "row", "row and bias", "row and float bias"],
    tokens=TOKENS,
    shape=SHAPES,
    dtype=HALVES,
)
def test_fp8(dtype, shape, tokens, kind, rng, as_ada):
    n, k = shape
    a = fp8((tokens, k), rng, gap=16)
    b = fp8((n, k), rng, gap=32).t()
    row = kind != "tensor"
    sa = scales((tokens, 1) if row else (1,), rng)
    sb = scales((1, n) if row else (1,), rng)
    bias = None
    if "bias" in kind:
        bias = spread((n,), torch.float32 if "float" in kind else dtype, rng)
    out = guarded((tokens, n), dtype, gap=8)
    assert rk.fp8_scaled_mm(a, b, sa, sb, dtype, bias, out=out.view) is out.view
    out.check()
    assert_close("fp8_scaled_mm", out.view, exact(a, b, sa, sb, bias), FP8[dtype])
    again = rk.fp8_scaled_mm(a, b, sa, sb, dtype, bias, static_weight=True, fast_accum=True)
    assert_same_bits(again, out.view)


# More tiles of tokens than a band has; a last band of one, of all; more rows than a tile of each.
@pytest.mark.parametrize(("tokens", "n"), [(1025, 272), (1100, 16), (2048, 400), (64, 4112)])
def test_bands_of_tiles(tokens, n, rng, as_ada):
    sa = scales((tokens, 1), rng)
    sb = scales((1, n), rng)
    for op, make, tolerance in (
        (rk.int8_scaled_mm, int8, ROUNDED_ONCE[torch.bfloat16]),
        (rk.fp8_scaled_mm, fp8, FP8[torch.bfloat16]),
    ):
        a = make((tokens, 400), rng)
        b = make((n, 400), rng).t()
        out = guarded((tokens, n), torch.bfloat16, gap=8)
        op(a, b, sa, sb, out=out.view)
        out.check()
        assert_close(f"{make.__name__} in bands", out.view, exact(a, b, sa, sb), tolerance)


@pytest.mark.parametrize("k", [16, 2048, 4112])
def test_rows_do_not_depend_on_the_others(k, rng, as_ada):
    """Nor on their number: each of the three tiles adds up in one order. A bias takes off nearly
    all of the first row, so that the last bits of its sums show."""
    n = 528
    sa = scales((300, 1), rng)
    sb = scales((n,), rng)
    for op, make in ((rk.int8_scaled_mm, int8), (rk.fp8_scaled_mm, fp8)):
        a = make((300, k), rng)
        b = make((n, k), rng).t()
        bias = -exact(a[:1], b, sa[:1], sb)[0].float()
        whole = op(a, b, sa, sb, bias=bias)
        for rows in (1, 16, 17, 64, 65, 200):
            assert_same_bits(op(a[:rows], b, sa[:rows], sb, bias=bias), whole[:rows])
        assert_same_bits(op(a[200:], b, sa[200:], sb, bias=bias), whole[200:])


def test_values_that_are_apart(rng, as_ada):
    """Scales, zero points and rows of operands have elements between them that are no part of the
    product."""
    a = int8((40, 288), rng)[::2]
    b = int8((96, 288), rng)[::3].t()
    sa = torch.full((40, 3), torch.nan)
    sa[:, 1] = scales((40,), rng) / 2**8
    sb = torch.full((2, 96), torch.nan)
    sb[0] = scales((96,), rng)
    azp = torch.full((20, 2), 2**30, dtype=torch.int32)
    azp[:, :1] = zero_points(20, rng)
    args = (a, b, sa[::2, 1:2], sb[:1, ::3])
    got = rk.int8_scaled_mm(*args, torch.float16, azp=azp[:, :1], b_sums=column_sums(b))
    expected = exact(*args, azp=azp[:, :1])
    assert_close("int8_scaled_mm", got, expected, ROUNDED_ONCE[torch.float16])


@pytest.mark.parametrize("tokens", [2, 40, 130])
def test_rows_that_are_far_apart(tokens, rng, as_ada):
    """Offsets that 32 bits do not hold."""
    sa = scales((tokens, 1), rng)
    sb = scales((1, 80), rng)
    for op, make in ((rk.int8_scaled_mm, int8), (rk.fp8_scaled_mm, fp8)):
        a = make((tokens, 272), rng)
        b = make((80, 272), rng)
        far_a = distant(a.shape, a.dtype).copy_(a)
        far_b = distant(b.shape, b.dtype).copy_(b)
        out = distant((tokens, 80), torch.bfloat16)
        op(far_a, far_b.t(), sa, sb, out=out)
        assert_same_bits(out.contiguous(), op(a, b.t(), sa, sb))


@pytest.mark.parametrize("tokens", [3, 40, 130])
def test_the_largest_sums(tokens, rng, as_ada):
    """Codes of -128 and 127 over the most columns: no sum wraps or stops at the end of int32."""
    low = torch.full((tokens, MOST), -128, dtype=torch.int8)
    low[1] = 127
    b = torch.full((32, MOST), -128, dtype=torch.int8)
    b[16:, ::2] = 127
    sa = scales((tokens, 1), rng)
    sb = scales((1, 32), rng) / 2**20
    got = rk.int8_scaled_mm(low, b.t(), sa, sb, torch.float16)
    expected = exact(low, b.t(), sa, sb)
    assert_close("int8_scaled_mm", got, expected, ROUNDED_ONCE[torch.float16])


@pytest.mark.parametrize("tokens", [5, 60, 200])
def test_small_differences_of_large_sums(tokens, as_ada):
    """What stays when a zero point is taken off is far below what float32 keeps of the sum."""
    a = torch.full((tokens, 16384), 127, dtype=torch.int8)
    a[:, 3] = 126
    b = torch.full((48, 16384), 127, dtype=torch.int8).t()
    b[3] = torch.arange(1, 49, dtype=torch.int8)
    azp = torch.full((tokens, 1), 127, dtype=torch.int32)
    one = torch.ones(1)
    got = rk.int8_scaled_mm(a, b, one, one, azp=azp, b_sums=column_sums(b))
    assert torch.equal(got.float(), -torch.arange(1.0, 49.0).expand(tokens, 48))


@pytest.mark.parametrize("tokens", [16, 64, 272])
def test_every_code(tokens, as_ada):
    """Products with ones are the codes themselves, and NaN stays NaN, in its row alone."""
    one = torch.ones(1)
    codes = torch.arange(-128, 128, dtype=torch.int8).view(16, 16).repeat(tokens // 16, 1)
    unit = torch.eye(16, dtype=torch.int8).t()
    assert torch.equal(rk.int8_scaled_mm(codes, unit, one, one).float(), codes.float())
    values = codes.view(torch.float8_e4m3fn)
    got = rk.fp8_scaled_mm(values, unit.float().to(torch.float8_e4m3fn), one, one).float()
    nan = torch.isnan(values.float())
    assert nan.any() and torch.equal(torch.isnan(got), nan.any(1, keepdim=True).expand_as(nan))
    whole = ~nan.any(1)
    assert torch.equal(got[whole], values.float()[whole])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"mat_b": torch.ones(32, 16, dtype=torch.int8)}, ValueError, "column-major"),
        ({"mat_a": torch.ones(2, 40, dtype=torch.int8)[:, :32]}, ValueError, "mat_a.*16 bytes"),
        ({"mat_b": torch.ones(15, 32, dtype=torch.int8).t()}, ValueError, "mat_b"),
        ({"scales_a": torch.ones(3)}, ValueError, "scales_a"),
        ({"bias": torch.ones(16).half()}, TypeError, "bias"),
        ({"azp": torch.ones(2, dtype=torch.int32)}, ValueError, "azp and b_sums"),
        ({"mat_a": torch.ones(2, 32)}, TypeError, "mat_a"),
    ],
)
def test_errors_name_the_argument(change, error, text, as_ada):
    ones = torch.ones(16, 32, dtype=torch.int8)
    args = {
        "mat_a": ones[:2],
        "mat_b": ones.t(),
        "scales_a": torch.ones(2),
        "scales_b": torch.ones(16),
    } | change
    with pytest.raises(error, match=text):
        rk.int8_scaled_mm(**args)


def test_there_is_no_gate(as_ada):
    ones = torch.ones(16, 32, dtype=torch.int8, device="cuda")
    scale = torch.ones(1, device="cuda")
    out = torch.ones(16, 8, dtype=torch.bfloat16, device="cuda")
    run = _loader.bind.int8_scaled_mm_sm80
    with pytest.raises(NotImplementedError, match="gate is 1"):
        run(ones, ones.t(), scale, scale, None, None, None, 1, False, out)
    run = _loader.bind.fp8_scaled_mm_sm89
    codes = ones.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="gate is 2"):
        run(codes, codes.t(), scale, scale, None, 2, False, False, out)
