"""`fused_experts` as its callers see it: the reference on the CPU, the chosen kernels with
`--device cuda`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _dispatch
from tests.kernel.experts_cases import (
    ACTIVATIONS,
    FNUZ,
    TOLERANCE,
    Experts,
    fp8_activations,
    make,
)
from tests.kernel.helpers import assert_close, assert_same_bits, guarded, integers

pytestmark = pytest.mark.cover("values")

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _native(monkeypatch):
    """A GPU that has native kernels uses them here for small batches too, where Triton is the
    faster."""
    monkeypatch.setattr("radix_kernels._choices.triton_experts_are_faster", lambda *_: False)


def run(case: Experts, out: torch.Tensor) -> torch.Tensor:
    return rk.fused_experts(
        case.x, case.w1, case.w2, case.weights, case.ids, out=out, **case.options
    )


def check(case: Experts, tolerance: tuple[float, float] | None = None) -> torch.Tensor:
    """Rows of the tokens and of the result are apart, with NaN between them."""
    x, out = (guarded(tuple(case.x.shape), case.x.dtype, gap=8) for _ in range(2))
    x.view.copy_(case.x)
    expected = case.oracle()
    case.x = x.view
    assert run(case, out.view) is out.view
    out.check()
    assert_close("fused_experts", out.view, expected, tolerance or TOLERANCE[case.x.dtype])
    return out.view


# (tokens, experts, topk, hidden, inter). A GPU takes up to 16 tokens and 128 pairs without a sort.
FEW = [
    (1, 4, 2, 64, 32),
    (1, 8, 8, 1024, 264),
    (7, 8, 2, 128, 64),
    (8, 128, 8, 520, 72),
    (16, 128, 8, 72, 40),
    (16, 8, 2, 1032, 136),
    (9, 3, 3, 16, 8),
    (2, 40, 32, 64, 16),
]
# Beyond: few pairs an expert, experts without pairs, up to and above 64 pairs, 256 and more, many
# experts; more than 4,096 pairs are sorted before their rows are gathered.
MANY = [
    (17, 4, 2, 64, 32),
    (16, 40, 12, 136, 72),
    (33, 128, 8, 200, 40),
    (64, 16, 4, 256, 192),
    (150, 2, 1, 72, 136),
    (300, 3, 2, 128, 64),
    (520, 2, 2, 64, 200),
    (100, 512, 10, 64, 16),
    (1030, 5, 4, 72, 24),
]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", FEW + MANY, ids=str)
def test_fused_experts(shape, dtype, rng):
    check(make(*shape, dtype, rng))


# Pairs of one expert around the widths of the GPU's tiles.
@pytest.mark.parametrize("tokens", [17, 31, 48, 65, 95, 97, 128, 129, 161, 193, 255, 257, 400, 513])
def test_pairs_of_one_expert(tokens, rng):
    case = make(tokens, 3, 1, 136, 72, torch.float16, rng)
    case.ids[:] = 1
    check(case)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scales", ["tensor", "block"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 4, 2, 64, 32),
        (8, 8, 2, 1040, 272),
        (16, 40, 8, 272, 144),
        (16, 3, 3, 128, 1168),
        (60, 4, 2, 256, 144),
        (150, 2, 1, 272, 144),
        (400, 3, 2, 128, 208),
    ],
    ids=str,
)
def test_fp8(shape, scales, dtype, rng):
    case = make(*shape, dtype, rng, scales=scales)
    case.w1[0, 0, :4] = torch.tensor([2.0**-9, -3 * 2.0**-9, 448, -0.0]).to(case.w1.dtype)
    check(case)


# One token, few pairs an expert; rows of 128 weight rows that end within a pair of blocks; many
# pairs of one expert.
FP8_BOTH = [
    (1, 4, 2, 128, 128),
    (5, 8, 3, 256, 384),
    (40, 40, 8, 384, 128),
    (300, 3, 2, 128, 384),
    (150, 2, 1, 640, 256),
    (130, 2, 2, 4224, 128),
    (1030, 5, 4, 128, 128),
    (700, 3, 1, 1024, 384),
]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", FP8_BOTH, ids=str)
def test_fp8_activations(shape, dtype, rng):
    case = make(*shape, dtype, rng, scales="block")
    case.x[0, :128] = 0
    case.options["use_fp8_w8a8"] = True
    check(case, fp8_activations(shape[0]))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("tokens", [3, 40])
def test_the_other_fp8_format(tokens, both, rng):
    case = make(tokens, 4, 2, 256, 128, torch.bfloat16, rng, scales="block", code=FNUZ)
    case.options["use_fp8_w8a8"] = both
    check(case, fp8_activations(tokens) if both else None)


@pytest.mark.parametrize("tokens", [17, 65, 97, 129, 145, 192, 193, 209, 289, 385, 577, 700])
def test_fp8_activations_of_one_expert(tokens, rng):
    case = make(tokens, 3, 1, 256, 128, torch.bfloat16, rng, scales="block")
    case.ids[:] = 1
    case.options["use_fp8_w8a8"] = True
    check(case, fp8_activations(tokens))


def test_fp8_activations_are_a_choice_of_block_scales(rng):
    case = make(3, 4, 2, 128, 128, torch.bfloat16, rng, scales="tensor")
    with pytest.raises(ValueError, match="a scale for a block"):
        run(replace(case, options={**case.options, "use_fp8_w8a8": True}), torch.empty_like(case.x))
    case = make(3, 4, 2, 192, 128, torch.bfloat16, rng, scales="block")
    with pytest.raises(ValueError, match="w1 has 192 columns"):
        run(replace(case, options={**case.options, "use_fp8_w8a8": True}), torch.empty_like(case.x))


@pytest.mark.parametrize("tokens", [4, 40, 200, 450])
def test_fp8_activations_repeat_and_keep_nan(tokens, rng):
    case = make(tokens, 4, 2, 256, 128, torch.bfloat16, rng, scales="block")
    case.options["use_fp8_w8a8"] = True
    clean = run(case, torch.empty_like(case.x))
    assert_same_bits(run(case, torch.empty_like(case.x)), clean)
    case.x[3, 5] = math.nan
    out = run(case, torch.empty_like(case.x))
    assert torch.isnan(out[3]).all()
    others = [t for t in range(tokens) if t != 3]
    assert_same_bits(out[others], clean[others])


@pytest.mark.parametrize("tokens", [6, 50, 1400])
def test_expert_map_and_foreign_ids(tokens, rng):
    """Local numbers past the weights' experts are another rank's too."""
    case = make(tokens, 3, 3, 64, 32, torch.float16, rng, named=8)
    case.options["expert_map"] = torch.tensor([-1, 2, 3, 0, 1030, 2**30, 1, -1], dtype=torch.int32)
    case.ids[1, :] = -1
    case.ids[2, 0] = 99
    assert (check(case)[1] == 0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 4, 4, 64, 32), (40, 8, 3, 136, 72), (300, 3, 2, 128, 64)], ids=str
)
def test_biases_and_activations(shape, dtype, activation, rng):
    """Hopper's own kernels have none of these: Triton's run."""
    case = make(*shape, dtype, rng).with_biases(rng, dtype)
    case.options["activation"] = activation
    case.ids[case.ids == 1] = 77  # an expert without pairs, whose bias adds nothing
    check(case)


@pytest.mark.parametrize("tokens", [3, 60])
def test_biases_under_an_expert_map(tokens, rng):
    case = make(tokens, 3, 3, 64, 32, torch.bfloat16, rng, named=8).with_biases(rng, torch.float32)
    case.options["expert_map"] = torch.tensor([-1, 2, -1, 0, -1, -1, 1, -1], dtype=torch.int32)
    case.options["activation"] = "swiglu_clamped"
    case.ids[1, :] = -1
    assert (check(case)[1] == 0).all()


@pytest.mark.cpu_only
def test_what_no_kernel_takes_is_the_references(rng, monkeypatch):
    def refuse(*args):
        raise NotImplementedError("none of these shapes")

    monkeypatch.setattr(_dispatch, "native", lambda op, x: refuse)
    monkeypatch.setattr(_dispatch, "_warned", set())
    with pytest.warns(RuntimeWarning, match="none of these shapes"):
        check(make(5, 4, 2, 64, 32, torch.float16, rng))


@pytest.mark.parametrize("tokens", [3, 40, 2100])
def test_no_expert_is_here(tokens, rng):
    case = make(tokens, 2, 2, 64, 32, torch.bfloat16, rng, named=4)
    case.options["expert_map"] = torch.full((4,), -1, dtype=torch.int32)
    assert (check(case) == 0).all()


# Weights in FP8 with either kind of scales, and activations in FP8 too.
FP8_KINDS = [("tensor", False), ("block", False), ("block", True)]


@pytest.mark.parametrize(("scales", "quantized"), FP8_KINDS)
@pytest.mark.parametrize("tokens", [6, 50, 1400])
def test_fp8_expert_map_and_foreign_ids(tokens, scales, quantized, rng):
    case = make(tokens, 3, 3, 128, 128, torch.bfloat16, rng, scales=scales, named=8)
    case.options["expert_map"] = torch.tensor([-1, 2, -1, 0, -1, -1, 1, -1], dtype=torch.int32)
    case.options["use_fp8_w8a8"] = quantized
    case.ids[1, :] = -1
    case.ids[2, 0] = 99
    assert (check(case, fp8_activations(tokens) if quantized else None)[1] == 0).all()


@pytest.mark.parametrize(("scales", "quantized"), FP8_KINDS)
@pytest.mark.parametrize("tokens", [3, 40, 2100])
def test_fp8_no_expert_is_here(tokens, scales, quantized, rng):
    case = make(tokens, 2, 2, 128, 128, torch.bfloat16, rng, scales=scales, named=4)
    case.options["expert_map"] = torch.full((4,), -1, dtype=torch.int32)
    case.options["use_fp8_w8a8"] = quantized
    assert (check(case) == 0).all()


@pytest.mark.parametrize("tokens", [4, 40])
def test_an_expert_named_twice(tokens, rng):
    case = make(tokens, 6, 2, 64, 32, torch.float16, rng)
    case.ids[:] = 4
    case.ids[0, 0] = 2
    check(case)


@pytest.mark.parametrize("tokens", [3, 16, 60, 300])
def test_repeats_bit_by_bit(tokens, rng):
    case = make(tokens, 4, 2, 128, 72, torch.bfloat16, rng)
    first = run(case, torch.empty_like(case.x))
    assert_same_bits(run(case, torch.empty_like(case.x)), first)


@pytest.mark.parametrize("tokens", [12, 40, 200])
def test_nan_stays_in_its_token(tokens, rng):
    case = make(tokens, 4, 2, 64, 32, torch.float16, rng)
    clean = run(case, torch.empty_like(case.x))
    case.x[7, 3] = math.nan
    out = run(case, torch.empty_like(case.x))
    others = [t for t in range(tokens) if t != 7]
    assert torch.isnan(out[7]).all()
    assert_same_bits(out[others], clean[others])


@pytest.mark.parametrize("tokens", [5, 40])
def test_an_expert_that_nobody_names_may_hold_anything(tokens, rng):
    case = make(tokens, 4, 2, 64, 32, torch.bfloat16, rng)
    case.ids[case.ids == 1] = 2
    clean = run(case, torch.empty_like(case.x))
    case.w1[1] = math.nan
    case.w2[1] = math.inf
    assert_same_bits(run(case, torch.empty_like(case.x)), clean)


@pytest.mark.parametrize("tokens", [5, 40])
def test_nan_of_an_expert_stays_with_who_names_it(tokens, rng):
    case = make(tokens, 4, 2, 64, 32, torch.bfloat16, rng)
    case.w2[3] = math.nan
    out = run(case, torch.empty_like(case.x))
    assert torch.equal(torch.isnan(out).all(1), (case.ids == 3).any(1))
    assert torch.equal(torch.isnan(out).any(1), (case.ids == 3).any(1))


@pytest.mark.parametrize("scales", ["", "block"])
@pytest.mark.parametrize("tokens", [2, 60])
def test_where_triton_is_faster(tokens, scales, rng, monkeypatch):
    monkeypatch.setattr("radix_kernels._choices.triton_experts_are_faster", lambda *_: True)
    check(make(tokens, 4, 2, 128, 64, torch.bfloat16, rng, scales=scales))


def test_random_batches(rng):
    for _ in range(6):
        tokens, experts, topk, hidden, inter = (
            int(integers(1, n, (1,), rng)) for n in (90, 12, 5, 40, 30)
        )
        check(make(tokens, max(experts, topk), topk, 8 * hidden, 8 * inter, torch.float16, rng))
