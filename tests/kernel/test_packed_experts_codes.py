"""Mixture of experts over weights of codes that meet x as it is: on Hopper one kernel for each
product (docs/kernels/quantized.md), on the CPU the kinds `int4` and `int8`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import radix_kernels as rk

# As imported: what the tests of single ops patch copies and waits, which a capture does not allow.
from radix_kernels import fused_experts_packed
from radix_kernels.packed_weight import FRAGMENT_LAYOUT
from tests.kernel.code_experts import CodeExperts, CodeKind, random_experts
from tests.kernel.experts_cases import TOLERANCE
from tests.kernel.helpers import assert_close, assert_same_bits, guarded

HALVES = [torch.bfloat16, torch.float16]
KINDS = [
    CodeKind(kind="int4", group=128),
    CodeKind(kind="int4", group=64, scale_dtype=torch.float16, zeros=True),
    CodeKind(kind="int4", group=32, scale_dtype=torch.float32),
    CodeKind(kind="int4", group=128, zeros=True),
    CodeKind(kind="mxfp4", group=32, scale_dtype=torch.uint8),
    CodeKind(kind="int4", group=0, zeros=True),
    CodeKind(kind="int8", group=128),
    CodeKind(kind="int8", group=0, scale_dtype=torch.float32),
]
# (tokens, experts, topk, hidden, inter): one token; few pairs (also test_packed_experts_few.py);
# sizes that end within a tile and within 128 of k, up rows that begin within a tile; experts
# without a token; tiles of up to 16 and of more than 64 pairs, whose last is not full; more of k
# than a ring of stages; no token.
SHAPES = [
    (1, 4, 2, 64, 32),
    (7, 8, 2, 128, 64),
    (5, 3, 3, 72, 48),
    (3, 40, 2, 200, 112),
    (90, 3, 1, 80, 16),
    (33, 2, 2, 320, 80),
    (20, 2, 1, 96, 48),
    (300, 2, 2, 200, 112),
    (170, 2, 1, 264, 96),
    (9, 2, 1, 2880, 1440),
    (5, 3, 3, 72, 40),  # not of Hopper's kernel
    (0, 2, 1, 64, 32),
]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where the ops run."""
    name = str(request.config.getoption("--device"))
    if name not in ("cpu", "cuda"):
        pytest.skip("packed codes are of the CPU library and of Hopper's")
    return name


def named(form: CodeKind) -> str:
    zeros = "-zeros" if form.zeros else ""
    return f"{form.kind}-{form.group}{zeros}"


def skip_unless_x_stays(device: str, form: CodeKind) -> None:
    if device == "cpu" and form.kind == "mxfp4":
        pytest.skip("the CPU's mxfp4 quantizes x (test_linear_mxfp4.py)")
    if device == "cpu" and form.kind == "int4" and not form.group:
        pytest.skip("the CPU has no int4 in whole rows")


def make(shape: Any, form: CodeKind, dtype: torch.dtype, rng: torch.Generator) -> CodeExperts:
    x = guarded((shape[0], shape[3]), dtype, gap=8).view
    x.copy_(torch.randn(x.shape, generator=rng))
    return random_experts(shape, form, x, rng)


def run(experts: CodeExperts, packed: rk.PackedExperts | None = None) -> torch.Tensor:
    case = experts.case
    out = guarded(tuple(case.x.shape), case.x.dtype, gap=8)
    got = rk.fused_experts_packed(
        case.x,
        packed or experts.pack(),
        case.weights,
        case.ids,
        out=out.view,
        **case.options,
    )
    assert got is out.view
    out.check()
    return got


def has_many_pairs(experts: CodeExperts) -> bool:
    """As `MixedProblem::takes_mixed_mma` divides calls (csrc/sm90/experts/mixed_problem.cuh)."""
    case = experts.case
    named_experts = len(case.options.get("expert_map", experts.w1))
    return case.ids.numel() > min(1024, 8 * named_experts)


def check(experts: CodeExperts, *, spare: float = 1.0) -> None:
    """Hopper's kernel for many pairs rounds each weight once: its worst element may be off from the
    weights' own values by more than the bound, where weights of one sign cancel. spare: by how
    much the norm of the error may be above the bound."""
    case = experts.case
    packed = experts.pack()
    got = run(experts, packed)
    norm, worst = TOLERANCE[case.x.dtype]
    norm *= spare
    expected = case.oracle()
    if packed.stacked is not None and has_many_pairs(experts):
        assert_close("fused_experts_packed many codes", got, expected, (norm, math.inf))
        expected = case.rounded().oracle()
    assert_close("fused_experts_packed codes", got, expected, (norm, worst))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", KINDS, ids=named)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes(shape, form, dtype, rng, device):
    skip_unless_x_stays(device, form)
    # Where I is no multiple of 16 gate and up are rounded before the activation, on the CPU: errors
    # are 4.8e-4 at the median in fp16, not 3.6e-4.
    check(make(shape, form, dtype, rng), spare=1.5 if shape[4] % 16 else 1.0)


@pytest.mark.parametrize("activation", ["swiglu_clamped", rk.ClampedSwiGlu(alpha=0.9, limit=0.6)])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [KINDS[0], KINDS[4]], ids=named)
@pytest.mark.parametrize("tokens", [3, 150])
def test_biases_and_the_clamped_swiglu(tokens, form, bias_dtype, activation, rng, device):
    skip_unless_x_stays(device, form)
    experts = make((tokens, 3, 2, 136, 80), form, torch.bfloat16, rng)
    experts.case.options["activation"] = activation
    if bias_dtype is not None:
        experts.case.with_biases(rng, bias_dtype)
    check(experts)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("form", [KINDS[0], KINDS[4]], ids=named)
@pytest.mark.parametrize("tokens", [3, 150])
def test_other_activations(tokens, form, activation, rng, device):
    """On a GPU in rows of codes, which Triton multiplies."""
    skip_unless_x_stays(device, form)
    experts = make((tokens, 3, 2, 136, 80), form, torch.bfloat16, rng)
    experts.case.options["activation"] = activation
    packed = experts.pack()
    if device == "cuda":
        assert packed.stacked is None
        assert packed.stacks is not None
    check(experts)


def test_other_activations_in_a_captured_graph(rng, device):
    if device == "cpu":
        pytest.skip("graphs are of a GPU")
    experts = make((9, 3, 2, 136, 80), KINDS[0], torch.bfloat16, rng)
    experts.case.options["activation"] = "gelu"
    packed = experts.pack()
    x = experts.case.x.cuda()
    weights = experts.case.weights.cuda()
    ids = experts.case.ids.cuda()

    def step() -> torch.Tensor:
        return fused_experts_packed(x, packed, weights, ids, activation="gelu")

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    captured.fill_(math.nan)
    graph.replay()
    assert_same_bits(captured.cpu(), expected.cpu())


@pytest.mark.parametrize("form", KINDS, ids=named)
@pytest.mark.parametrize("tokens", [12, 160])
def test_experts_elsewhere(tokens, form, rng, device):
    """Ids outside of the experts, experts of other ranks, and a token without any add nothing."""
    skip_unless_x_stays(device, form)
    experts = make((tokens, 3, 2, 96, 48), form, torch.bfloat16, rng)
    case = experts.case
    case.ids[3, 0] = -1
    case.ids[4, 1] = 99
    case.ids[5] = 77
    check(experts)
    case.options["expert_map"] = torch.tensor([2, -1, 0, 1, -1], dtype=torch.int32)
    case.ids[6] = 4
    case.ids[7, 0] = 3
    check(experts)


@pytest.mark.parametrize("form", [KINDS[2], KINDS[4]], ids=named)
@pytest.mark.parametrize("tokens", [6, 60], ids=["few pairs", "many pairs"])
def test_large_and_small_scales(tokens, form, rng, device):
    """Powers of two beyond those that go into one product of bf16, and the smallest."""
    skip_unless_x_stays(device, form)
    experts = make((tokens, 2, 1, 128, 64), form, torch.bfloat16, rng)
    assert has_many_pairs(experts) == (tokens == 60)
    for weight in experts.w1:
        if form.kind == "mxfp4":
            weight.scales[::3] += 18  # above 128, of some rows of a warp
            weight.scales[::5] = 0
        else:
            weight.scales[::3] *= 2.0**18
            weight.scales[::5] *= 2.0**-110
    experts.case.w1.copy_(torch.stack([w.values() for w in experts.w1]))
    experts.case.x.mul_(2.0**-6)
    check(experts)


@pytest.mark.parametrize("form", [KINDS[0], KINDS[4]], ids=named)
@pytest.mark.parametrize("tokens", [20, 150])
def test_what_is_no_number_stays_in_its_row(tokens, form, rng, device):
    skip_unless_x_stays(device, form)
    experts = make((tokens, 3, 2, 136, 64), form, torch.bfloat16, rng)
    clean = run(experts)
    experts.case.x[7, 5] = math.nan
    experts.case.x[11, 0] = math.inf
    got = run(experts)
    others = [row for row in range(tokens) if row not in (7, 11)]
    assert torch.isnan(got[7]).all()
    assert not torch.isfinite(got[11]).any()
    assert_same_bits(got[others], clean[others])


@pytest.mark.parametrize("form", KINDS, ids=named)
def test_same_bits_each_time_and_in_place(form, rng, device):
    skip_unless_x_stays(device, form)
    experts = make((70, 4, 2, 256, 128), form, torch.bfloat16, rng)
    packed = experts.pack()
    first = run(experts, packed)
    assert_same_bits(run(experts, packed), first)
    case = experts.case
    rk.fused_experts_packed(case.x, packed, case.weights, case.ids, out=case.x)
    assert_same_bits(case.x, first)


def test_more_than_4096_pairs_are_sorted(rng, device):
    """By two launches, so that the first weights are read ahead."""
    if device == "cpu":
        pytest.skip("of Hopper's kernels")
    experts = make((700, 16, 8, 64, 32), KINDS[0], torch.bfloat16, rng)
    check(experts)


def test_experts_of_two_kinds(rng, device):
    if device == "cpu":
        pytest.skip("the CPU's experts are each packed alone")
    one = make((1, 2, 1, 64, 32), KINDS[0], torch.bfloat16, rng).pack()
    other = make((1, 2, 1, 64, 32), KINDS[4], torch.bfloat16, rng).pack()
    with pytest.raises(ValueError, match="differ"):
        rk.PackedExperts(w1=(one.w1[0], other.w1[1]), w2=one.w2)


def test_stacked_experts_hold_nothing_but_the_stack():
    """What held the weights before is freed: every part, that which describes them too."""
    sizes = {
        "layout": FRAGMENT_LAYOUT,
        "dtype": "bfloat16",
        "kind": "int8",
        "scale_dtype": "bfloat16",
    }

    def weights(n: int, k: int) -> tuple[rk.PackedWeight, ...]:
        data = [torch.full((n * k,), i, dtype=torch.uint8) for i in range(3)]
        return tuple(rk.PackedWeight(data=each, n=n, k=k, **sizes) for each in data)

    packed = rk.PackedExperts(w1=weights(64, 16), w2=weights(16, 32))
    stacked = packed.stacked
    assert stacked is not None
    for stack, held in (
        (stacked.w1, (*packed.w1, stacked.first)),
        (stacked.w2, (*packed.w2, stacked.second)),
    ):
        assert stack[:, 0].tolist() == [0, 1, 2]
        storages = {weight.data.untyped_storage().data_ptr() for weight in held}
        assert storages == {stack.untyped_storage().data_ptr()}


def test_what_the_kernel_does_not_take_is_never_held_three_times(rng, device):
    """Beside the weights as they were given and the stacks there is one expert."""
    if device == "cpu":
        pytest.skip("of Hopper's layout")
    experts = make((1, 12, 1, 1024, 512), CodeKind(kind="int8", group=32), torch.bfloat16, rng)
    w1 = tuple(w.pack(torch.bfloat16) for w in experts.w1)
    w2 = tuple(w.pack(torch.bfloat16) for w in experts.w2)
    assert w1[0].layout == FRAGMENT_LAYOUT
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = rk.PackedExperts(w1=w1, w2=w2)
    taken = torch.cuda.max_memory_allocated() - before
    assert packed.stacks is not None
    assert packed.nbytes <= taken <= packed.nbytes + 2 * w1[0].nbytes
    assert_close("int8-32", run(experts, packed), experts.case.oracle(), TOLERANCE[torch.bfloat16])


def test_wrong_arguments(rng):
    experts = make((6, 3, 2, 64, 32), KINDS[0], torch.bfloat16, rng)
    case = experts.case
    packed = experts.pack()
    with pytest.raises(TypeError):
        rk.fused_experts_packed(case.x.half(), packed, case.weights, case.ids)
    with pytest.raises(ValueError):
        rk.fused_experts_packed(case.x[:, :32], packed, case.weights, case.ids)
    with pytest.raises(ValueError):
        rk.fused_experts_packed(case.x, packed, case.weights[:, :1], case.ids)
