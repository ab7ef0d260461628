"""Experts over weights of codes on GPUs against float64 of what the codes stand for: in Triton's
interpreter, or on the GPU that is there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _dispatch, _loader
from tests.kernel.code_weights import FORMS, random_weight
from tests.kernel.experts_cases import ACTIVATIONS, TOLERANCE, Experts
from tests.kernel.helpers import FLOATS, assert_close, assert_same_bits, guarded, spread
from tests.kernel.triton_device import DEVICE, INTERPRETED, need_triton

need_triton()

TOLERANCE = dict(TOLERANCE)
if INTERPRETED:  # the interpreter cuts float32 to bfloat16 where a chip rounds to the nearest
    TOLERANCE[torch.bfloat16] = (1.5e-2, 6e-2)
# (tokens, experts, topk, hidden, inter): one token, few pairs, sorted ones, odd sizes, more tokens
# than a block has rows.
SHAPES = [
    (1, 4, 2, 64, 32),
    (7, 8, 2, 130, 64),
    (21, 3, 3, 72, 42),
    (40, 4, 2, 66, 48),
    (150, 3, 1, 80, 34),
]

pytestmark = [
    pytest.mark.cover("values"),
    pytest.mark.cpu_only,  # `--device` moves the public ops alone
    pytest.mark.usefixtures("interpreter_widens_bfloat16"),
]


@pytest.fixture(autouse=True)
def _through_triton(monkeypatch):
    """The public ops choose as on a GPU that the library has no kernel for; what sorts pairs is the
    reference."""
    monkeypatch.setattr(_loader, "bind", None)
    monkeypatch.setattr(_dispatch, "_GPUS", ("cpu", "cuda", "rocm"))
    rk.set_fallback("reference")
    _dispatch.choose_anew()
    yield
    _dispatch.choose_anew()


def make(shape, kind, group, origin, dtype, rng, named=None):
    """(float64 of what the codes stand for, the packed experts)."""
    tokens, experts, topk, hidden, inter = shape
    pairs = [
        (
            random_weight(kind, group, origin, 2 * inter, hidden, rng),
            random_weight(kind, group, origin, hidden, inter, rng),
        )
        for _ in range(experts)
    ]
    ids = torch.stack(
        [torch.randperm(named or experts, generator=rng)[:topk] for _ in range(tokens)]
    ).int()
    case = Experts(
        x=spread((tokens, hidden), dtype, rng, gap=4),
        w1=torch.stack([first.value for first, _ in pairs]),
        w2=torch.stack([second.value for _, second in pairs]),
        weights=torch.rand(tokens, topk, generator=rng),
        ids=ids,
        options={},
    )
    packed = rk.PackedExperts(
        w1=tuple(first.pack(dtype, DEVICE) for first, _ in pairs),
        w2=tuple(second.pack(dtype, DEVICE) for _, second in pairs),
    )
    return case, packed


def run(case, packed, **more):
    """Into a result among NaNs; nothing else may be written."""
    options = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in (case.options | more).items()
    }
    out = guarded(tuple(case.x.shape), case.x.dtype, gap=8)
    there = out.view
    x = case.x
    if DEVICE != "cpu":
        there = out._buffer.to(DEVICE).as_strided(out.view.shape, out.view.stride(), 32)
        x = x._base.to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())
    given = (x, packed, case.weights.to(DEVICE), case.ids.to(DEVICE))
    assert rk.fused_experts_packed(*given, out=there, **options) is there
    out.view.copy_(there)
    out.check()
    return out.view


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("kind", "group", "origin"), FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, kind, group, origin, dtype, rng):
    case, packed = make(shape, kind, group, origin, dtype, rng)
    assert packed.stacks is not None
    got = run(case, packed)
    assert_close("fused_experts_codes", got, case.oracle(), TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str)
@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_biases_and_activations(kind, shape, activation, rng):
    case, packed = make(shape, kind, 32, "", torch.float16, rng)
    case.options["activation"] = activation
    case.with_biases(rng, torch.float32 if kind == "int4" else torch.float16)
    got = run(case, packed)
    assert_close("fused_experts_codes", got, case.oracle(), TOLERANCE[torch.float16])


@pytest.mark.parametrize("tokens", [3, 40])
def test_expert_map_and_foreign_ids(tokens, rng):
    shape = (tokens, 3, 2, 64, 32)
    case, packed = make(shape, "int4", 32, "zeros", torch.float32, rng, named=5)
    case.ids[0, 0] = 7
    case.ids[1, 1] = -1
    case.options["expert_map"] = torch.tensor([2, -1, 0, 1, 5], dtype=torch.int32)
    got = run(case, packed)
    assert_close("fused_experts_codes", got, case.oracle(), TOLERANCE[torch.float32])


def test_nothing_to_do(rng):
    case, packed = make((2, 3, 2, 64, 32), "int4", 32, "", torch.float32, rng)
    assert not run(replace(case, ids=case.ids * 0 - 1), packed).any()
    none = replace(case, x=case.x[:0], weights=case.weights[:0], ids=case.ids[:0])
    given = (none.x.to(DEVICE), packed, none.weights.to(DEVICE), none.ids.to(DEVICE))
    assert rk.fused_experts_packed(*given).shape == (0, 64)


def test_nan_stays_in_its_token(rng):
    for tokens in (4, 40):
        case, packed = make((tokens, 3, 2, 64, 32), "int8", 0, "", torch.float32, rng)
        clean = run(case, packed).clone()
        case.x[2, 5] = math.nan
        got = run(case, packed)
        assert torch.isnan(got[2]).all()
        others = [i for i in range(tokens) if i != 2]
        assert_same_bits(got[others], clean[others])


def test_the_result_may_be_the_input(rng):
    case, packed = make((30, 3, 2, 64, 32), "int4", 64, "", torch.float16, rng)
    expected = run(case, packed)
    x = case.x.contiguous().to(DEVICE)
    given = (x, packed, case.weights.to(DEVICE), case.ids.to(DEVICE))
    assert rk.fused_experts_packed(*given, out=x) is x
    assert_same_bits(x.cpu(), expected.contiguous())


def test_rows_of_one_tensor_are_not_copied(rng):
    _, packed = make((1, 4, 2, 64, 32), "int4", 32, "zeros", torch.bfloat16, rng)
    again = rk.PackedExperts(w1=packed.w1, w2=packed.w2)
    for mine, theirs in zip(again.stacks, packed.stacks, strict=True):
        assert mine.data_ptr() == theirs.data_ptr() and mine.shape == theirs.shape
    assert again.nbytes == packed.nbytes == sum(stack.numel() for stack in packed.stacks)
    backwards = rk.PackedExperts(w1=packed.w1[::-1], w2=packed.w2[::-1])
    assert torch.equal(backwards.stacks[0], packed.stacks[0].flip(0))
    for side, stack in zip((backwards.w1, backwards.w2), backwards.stacks, strict=True):
        storages = {weight.data.untyped_storage().data_ptr() for weight in side}
        assert storages == {stack.untyped_storage().data_ptr()}


def test_experts_of_different_forms(rng):
    """Some without zero points, some with scales of another dtype: one form holds all."""
    case, packed = make((9, 3, 2, 64, 32), "int4", 32, "zeros", torch.float16, rng)
    _, other = make((9, 3, 2, 64, 32), "int4", 32, "", torch.float16, rng)
    names = ("w", "scales")
    codes = dict(zip(names, rk.unpack_weight(other.w1[1])[:2], strict=True))
    for scale_dtype in (torch.bfloat16, torch.float16):
        codes["scales"] = torch.full_like(codes["scales"], 0.125).to(scale_dtype)
        changed = rk.pack_weight(**codes, kind="int4", group=32, dtype=torch.float16)
        mixed = rk.PackedExperts(w1=(packed.w1[0], changed, packed.w1[2]), w2=packed.w2)
        pairs = codes["w"].cpu()
        case.w1[1] = (torch.stack((pairs & 15, pairs >> 4), -1).flatten(1).double() - 8) / 8
        got = run(case, mixed)
        assert_close("fused_experts_codes", got, case.oracle(), TOLERANCE[torch.float16])
    _, wide = make((9, 3, 2, 64, 32), "int4", 64, "zeros", torch.float16, rng)
    with pytest.raises(ValueError, match="differ in form"):
        rk.PackedExperts(w1=(packed.w1[0], wide.w1[1]), w2=packed.w2[:2])


def test_products_that_do_not_fit_together(rng):
    _, packed = make((1, 3, 2, 64, 32), "int4", 32, "", torch.bfloat16, rng)
    with pytest.raises(ValueError, match=r"w1 has 3 experts, expected 2 \(w2\)"):
        rk.PackedExperts(w1=packed.w1, w2=packed.w2[:2])
    _, wide = make((1, 3, 2, 64, 48), "int4", 32, "", torch.bfloat16, rng)
    with pytest.raises(ValueError, match=r"w1\[0\] has shape \(64, 64\), expected \(96, 64\)"):
        rk.PackedExperts(w1=packed.w1, w2=wide.w2)


def test_errors(rng):
    case, packed = make((4, 3, 2, 64, 32), "int4", 32, "", torch.float16, rng)
    x = case.x.to(DEVICE)
    weights = case.weights.to(DEVICE)
    ids = case.ids.to(DEVICE)
    for arguments, error, message in (
        ((x.float(), packed, weights, ids), TypeError, "hidden_states has dtype"),
        ((x[:, 1:], packed, weights, ids), ValueError, r"hidden_states has shape \[4, 63\]"),
        ((x, packed, weights[1:], ids), ValueError, "topk_weights"),
        ((x, packed, weights, ids.long()), TypeError, "topk_ids"),
    ):
        with pytest.raises(error, match=message):
            rk.fused_experts_packed(*arguments)
    with pytest.raises(ValueError, match="bias1"):
        rk.fused_experts_packed(x, packed, weights, ids, bias1=torch.zeros(3, 63, device=DEVICE))
    with pytest.raises(ValueError, match="activation"):
        rk.fused_experts_packed(x, packed, weights, ids, activation="relu")


def test_quantized_here(rng):
    w1 = torch.randn(3, 96, 64, generator=rng) / 8
    w2 = torch.randn(3, 64, 48, generator=rng) / 7
    for kind, group in (("int4", 64), ("int8", 0)):
        packed = rk.pack_experts(w1.to(DEVICE), w2.to(DEVICE), kind, group=group)
        case, _ = make((5, 3, 2, 64, 48), kind, group, "", torch.float32, rng)
        ones = torch.eye(64, device=DEVICE)
        case.w1 = torch.stack([rk.linear(ones, w).T.double().cpu() for w in packed.w1])
        case.w2 = torch.stack([rk.linear(ones[:48, :48], w).T.double().cpu() for w in packed.w2])
        assert (case.w1 - w1).abs().max() < 0.08
        got = run(case, packed)
        assert_close("fused_experts_codes", got, case.oracle(), TOLERANCE[torch.float32])


def test_a_gpu_without_a_kernel_is_served_by_triton():
    for device in ("cuda", "rocm"):
        assert _dispatch.describe("fused_experts_codes", device)[0] == "triton"
