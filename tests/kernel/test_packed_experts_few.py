"""Few pairs of an expert over weights of codes on Hopper: mma.sync with 8 or 16 pairs a tile, k
shared by two warps or by none (docs/kernels/quantized.md)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import radix_kernels as rk

# As imported: what the tests of single ops patch copies and waits, which a capture does not allow.
from radix_kernels import fused_experts_packed, stacked_experts
from tests.kernel.code_experts import CodeExperts, CodeKind, random_experts
from tests.kernel.experts_cases import TOLERANCE
from tests.kernel.helpers import assert_close, assert_same_bits, guarded

KINDS = [
    CodeKind(kind="int4", group=128),
    CodeKind(kind="int4", group=128, scale_dtype=torch.float32, zeros=True),
    CodeKind(kind="int4", group=64, scale_dtype=torch.float16, zeros=True),
    CodeKind(kind="int4", group=32),
    CodeKind(kind="int4", group=32, zeros=True),
    CodeKind(kind="int4", group=0, zeros=True),
    CodeKind(kind="mxfp4", group=32, scale_dtype=torch.uint8),
    CodeKind(kind="int8", group=128),
    CodeKind(kind="int8", group=0, scale_dtype=torch.float32),
]
INT4 = KINDS[0]
MXFP4 = KINDS[6]
TOKENS = [1, 2, 3, 5, 8, 9, 16, 17, 33, 64]
# (experts, topk, hidden, inter). Up to 8 strips of 16 rows a multiprocessor two warps share k: here
# whatever the tokens. 64 tokens have more than 4 pairs an expert, and so 16 pairs a tile. Sizes end
# within a strip, a tile of 64 and a group; up rows begin within a tile.
SMALL = (16, 2, 200, 112)
# From 20 tokens on all experts may be named, and no warps share k; 150 tokens have 16 pairs a tile.
WIDE = (40, 2, 520, 272)
# More tiles than multiprocessors, of one product or the other.
LONG = [(16, 2, 2888, 144), (16, 2, 136, 1040)]


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") != "cuda":
        pytest.skip("of Hopper's kernels")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace holds NaN."""
    empty = stacked_experts.empty

    def filled(*args: Any) -> Any:
        workspace = empty(*args)
        torch.as_tensor(workspace).fill_(0xFF)
        return workspace

    monkeypatch.setattr(stacked_experts, "empty", filled)


def named(form: CodeKind) -> str:
    zeros = "-zeros" if form.zeros else ""
    return f"{form.kind}-{form.group}{zeros}"


def make(
    tokens: int,
    sizes: tuple[int, int, int, int],
    form: CodeKind,
    rng: torch.Generator,
    dtype: torch.dtype = torch.bfloat16,
) -> CodeExperts:
    experts, topk, hidden, inter = sizes
    x = guarded((tokens, hidden), dtype, gap=8).view
    x.copy_(torch.randn(x.shape, generator=rng))
    return random_experts((tokens, experts, topk, hidden, inter), form, x, rng)


def run(experts: CodeExperts, packed: rk.PackedExperts, rows: slice = slice(None)) -> torch.Tensor:
    """Some tokens of the call."""
    case = experts.case
    x = case.x[rows]
    out = guarded(tuple(x.shape), x.dtype, gap=8)
    weights = case.weights[rows]
    rk.fused_experts_packed(x, packed, weights, case.ids[rows], out=out.view, **case.options)
    out.check()
    return out.view


def check(experts: CodeExperts) -> None:
    packed = experts.pack()
    assert packed.stacked is not None
    got = run(experts, packed)
    bounds = TOLERANCE[experts.case.x.dtype]
    assert_close("fused_experts_packed few", got, experts.case.oracle(), bounds)


@pytest.mark.parametrize("form", KINDS, ids=named)
@pytest.mark.parametrize("tokens", TOKENS)
def test_tokens(tokens, form, rng):
    check(make(tokens, SMALL, form, rng))


@pytest.mark.parametrize("form", KINDS, ids=named)
@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_float16(tokens, form, rng):
    check(make(tokens, SMALL, form, rng, torch.float16))


@pytest.mark.parametrize("form", KINDS, ids=named)
@pytest.mark.parametrize("tokens", [20, 64, 150])
def test_whole_k_a_warp(tokens, form, rng):
    check(make(tokens, WIDE, form, rng))


@pytest.mark.parametrize("form", [INT4, MXFP4], ids=named)
@pytest.mark.parametrize("sizes", LONG, ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_more_tiles_than_blocks(tokens, sizes, form, rng):
    check(make(tokens, sizes, form, rng))


@pytest.mark.parametrize("sizes", [SMALL, WIDE], ids=str)
@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_large_powers_of_two_among_small_ones(tokens, sizes, rng):
    """Of `mxfp4`: some of a warp's groups are multiplied twice, others of the same row are not."""
    experts = make(tokens, sizes, MXFP4, rng)
    for weight in experts.w2:
        chosen = torch.rand(weight.scales.shape, generator=rng) < 0.1
        chosen[0, 0] = True
        weight.scales[chosen] += 10  # to 129 and more
    assert all((weight.scales > 128).any() for weight in experts.w2)
    experts.case.w2.copy_(torch.stack([weight.values() for weight in experts.w2]))
    check(experts)


@pytest.mark.parametrize("power", [0, 1, 127, 128, 129, 252])
@pytest.mark.parametrize("tokens", [1, 60])
def test_powers_of_two_from_end_to_end(tokens, power, rng):
    """One group has this power, in either product; what it multiplies keeps the sums in float32."""
    experts = make(tokens, SMALL, MXFP4, rng)
    for weight in (*experts.w1, *experts.w2):
        weight.scales[:, 1] = power
        if power > 129:
            weight.codes[:, 32:64] = 0
    case = experts.case
    case.w1.copy_(torch.stack([weight.values() for weight in experts.w1]))
    case.w2.copy_(torch.stack([weight.values() for weight in experts.w2]))
    check(experts)


# One step of k, a width of one strip, odd multiples, one expert of many.
@pytest.mark.parametrize(
    "sizes", [(1, 1, 8, 16), (2, 2, 8, 16), (5, 5, 72, 48), (1000, 4, 24, 16), (7, 3, 136, 80)]
)
@pytest.mark.parametrize("form", [INT4, MXFP4, KINDS[7]], ids=named)
def test_sizes(sizes, form, rng):
    check(make(7, sizes, form, rng))


@pytest.mark.parametrize("activation", ["swiglu_clamped", rk.ClampedSwiGlu(alpha=0.9, limit=0.6)])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [INT4, MXFP4], ids=named)
@pytest.mark.parametrize(("tokens", "sizes"), [(1, SMALL), (17, SMALL), (64, SMALL), (64, WIDE)])
def test_biases_and_the_clamped_swiglu(tokens, sizes, form, bias_dtype, activation, rng):
    experts = make(tokens, sizes, form, rng)
    experts.case.options["activation"] = activation
    if bias_dtype is not None:
        experts.case.with_biases(rng, bias_dtype)
    check(experts)


@pytest.mark.parametrize("form", [INT4, MXFP4], ids=named)
@pytest.mark.parametrize("tokens", [8, 9, 16, 17, 33, 64])
def test_all_tokens_to_one_expert(tokens, form, rng):
    """One expert has more pairs than a tile, the others none; then each token names it twice."""
    experts = make(tokens, SMALL, form, rng)
    experts.case.ids.fill_(-1)
    experts.case.ids[:, 1] = 11
    check(experts)
    experts.case.ids.fill_(11)
    check(experts)


@pytest.mark.parametrize("form", [INT4, MXFP4], ids=named)
@pytest.mark.parametrize("tokens", [1, 12, 64])
def test_nobody(tokens, form, rng):
    """No id is of an expert here: the result is 0."""
    experts = make(tokens, SMALL, form, rng)
    experts.case.ids.fill_(99)
    packed = experts.pack()
    assert (run(experts, packed) == 0).all()


@pytest.mark.parametrize("form", KINDS, ids=named)
def test_experts_elsewhere(form, rng):
    """Ids outside of the experts, experts of other ranks, and a token without any add nothing."""
    experts = make(30, SMALL, form, rng)
    case = experts.case
    case.ids[3, 0] = -1
    case.ids[4, 1] = 99
    case.ids[5] = 77
    check(experts)
    mapped = torch.full((40,), -1, dtype=torch.int32)
    mapped[4:20] = torch.randperm(16, generator=rng)
    case.options["expert_map"] = mapped
    case.ids[:] = torch.randint(0, 40, case.ids.shape, generator=rng)
    case.ids[6] = 2
    check(experts)


@pytest.mark.parametrize("form", [INT4, MXFP4], ids=named)
@pytest.mark.parametrize("tokens", [150, 512])
def test_many_pairs_of_few_experts(tokens, form, rng):
    """Of the experts that a map of all ranks names three are here: many tiles of each."""
    experts = make(tokens, (3, 2, 136, 80), form, rng)
    mapped = torch.full((1024,), -1, dtype=torch.int32)
    mapped[:3] = torch.tensor([1, 2, 0])
    experts.case.options["expert_map"] = mapped
    check(experts)


@pytest.mark.parametrize("form", [INT4, MXFP4], ids=named)
@pytest.mark.parametrize("tokens", [20, 60])
def test_what_is_no_number_stays_in_its_row(tokens, form, rng):
    experts = make(tokens, SMALL, form, rng)
    packed = experts.pack()
    clean = run(experts, packed)
    experts.case.x[7, 5] = math.nan
    experts.case.x[11, 0] = math.inf
    got = run(experts, packed)
    others = [row for row in range(tokens) if row not in (7, 11)]
    assert torch.isnan(got[7]).all()
    assert not torch.isfinite(got[11]).any()
    assert_same_bits(got[others], clean[others])


@pytest.mark.parametrize("form", KINDS, ids=named)
@pytest.mark.parametrize(("sizes", "least", "most"), [(SMALL, 1, 64), (WIDE, 20, 150)])
def test_bits_depend_on_no_other_token(sizes, least, most, form, rng):
    """Nor on the number of tokens, as long as as many warps share k."""
    experts = make(most, sizes, form, rng)
    packed = experts.pack()
    whole = run(experts, packed)
    for tokens in (least, least + 2, least + 7, least + 16, most - 1):
        begin = int(torch.randint(0, most - tokens + 1, (), generator=rng))
        rows = slice(begin, begin + tokens)
        assert_same_bits(run(experts, packed, rows), whole[rows])


@pytest.mark.parametrize("form", [INT4, MXFP4], ids=named)
@pytest.mark.parametrize("tokens", [3, 64])
def test_same_bits_each_time_and_in_place(tokens, form, rng):
    experts = make(tokens, SMALL, form, rng)
    packed = experts.pack()
    first = run(experts, packed)
    for _ in range(20):
        assert_same_bits(run(experts, packed), first)
    case = experts.case
    rk.fused_experts_packed(case.x, packed, case.weights, case.ids, out=case.x)
    assert_same_bits(case.x, first)


@pytest.mark.parametrize("form", [INT4, MXFP4], ids=named)
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_ids_of_the_kernel_ahead(tokens, form, rng):
    """A captured graph, which launches early: ids, weights and x are written right before."""
    experts = make(tokens, WIDE, form, rng)
    packed = experts.pack()
    case = experts.case
    given = [t.cuda() for t in (case.x.contiguous(), case.weights, case.ids)]
    x, weights, ids = (torch.zeros_like(t) for t in given)

    def step() -> torch.Tensor:
        for to, source in zip((x, weights, ids), given, strict=True):
            to.copy_(source)
        return fused_experts_packed(x, packed, weights, ids)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        case.ids[:] = torch.stack(
            [torch.randperm(WIDE[0], generator=rng)[: WIDE[1]] for _ in range(tokens)]
        )
        given[2].copy_(case.ids)
        captured.fill_(math.nan)
        ids.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert_close("captured", captured.cpu(), case.oracle(), TOLERANCE[torch.bfloat16])
