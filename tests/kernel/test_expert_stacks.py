"""In which order experts of codes are held, and what that takes in memory on the way. Weights in
the order of Hopper's library are made of bytes that only these tests can unpack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import radix_kernels as rk
from radix_kernels import codes_layout, weight_stack
from radix_kernels.codes_layout import CODES_LAYOUT, CodeParts, CodesForm
from radix_kernels.packed_weight import FRAGMENT_LAYOUT, in_codes
from tests.kernel.helpers import integers

EXPERTS = 8
HIDDEN = 512
INTER = 256


@pytest.fixture(autouse=True)
def _unpacked_by_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(weight: rk.PackedWeight) -> Any:
        assert weight.layout == FRAGMENT_LAYOUT
        return codes_layout.unpack(weight.data, weight.form)

    monkeypatch.setattr(weight_stack, "unpack_weight", unpack)


def fragments(
    n: int, k: int, group: int, rng: torch.Generator, *, zeros: bool = False
) -> rk.PackedWeight:
    """Random codes of 4 bits."""
    form = CodesForm(
        n=n, k=k, dtype="bfloat16", kind="int4", group=group, scale_dtype="bfloat16", zeros=zeros
    )
    groups = (n, -(-k // group))
    given = CodeParts(
        codes=None,
        scales=torch.rand(groups, generator=rng).bfloat16(),
        zeros=integers(0, 17, groups, rng).to(torch.uint8) if zeros else None,
        mins=None,
    )
    codes = integers(0, 256, (n, k // 2), rng).to(torch.uint8)
    packed = in_codes(codes_layout.pack("test", codes, given, form), form)
    return replace(packed, layout=FRAGMENT_LAYOUT, descriptor=None)


def both_products(group: int, rng: torch.Generator) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    w1 = tuple(fragments(2 * INTER, HIDDEN, group, rng) for _ in range(EXPERTS))
    w2 = tuple(fragments(HIDDEN, INTER, group, rng) for _ in range(EXPERTS))
    return w1, w2


def peak_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call gives, and the most bytes that it held at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        result = call()
    held = 0
    peak = 0
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return result, peak


def assert_same_weights(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.layout == CODES_LAYOUT
        assert mine.form == theirs.form
        for part, other in zip(
            codes_layout.unpack(mine.data, mine.form),
            codes_layout.unpack(theirs.data, theirs.form),
            strict=True,
        ):
            assert part is other is None or torch.equal(part, other)


def test_what_the_kernel_takes_stays_in_its_order(rng):
    w1, w2 = both_products(128, rng)
    for activation in ("silu", "swiglu_clamped", rk.ClampedSwiGlu(limit=3.0)):
        experts = rk.PackedExperts(w1=w1, w2=w2, activation=activation)
        assert experts.stacked is not None
        sizes = {"hidden": HIDDEN, "width": INTER, "activation": activation}
        assert rk.PackedExperts.part(w1[0], **sizes) is w1[0]


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_what_it_does_not_take_is_held_in_rows_of_codes(activation, rng):
    w1, w2 = both_products(128, rng)
    experts = rk.PackedExperts(w1=w1, w2=w2, activation=activation)
    assert experts.stacked is None
    assert_same_weights(experts.w1, w1)
    assert_same_weights(experts.w2, w2)
    sizes = {"hidden": HIDDEN, "width": INTER}
    parts = [rk.PackedExperts.part(w, **sizes, activation=activation) for w in (w1[0], w2[0])]
    assert_same_weights(parts, (w1[0], w2[0]))
    for other in ({"hidden": HIDDEN + 4, "width": INTER}, {"hidden": HIDDEN, "width": INTER + 8}):
        assert rk.PackedExperts.part(w1[0], **other).layout == CODES_LAYOUT
    with pytest.raises(ValueError, match="activation is 'relu'"):
        rk.PackedExperts.part(w1[0], **sizes, activation="relu")
    with pytest.raises(ValueError, match="activation is 'relu'"):
        rk.PackedExperts(w1=w1, w2=w2, activation="relu")


def test_what_was_packed_for_silu_may_be_packed_again(rng):
    w1, w2 = both_products(128, rng)
    first = rk.PackedExperts(w1=w1, w2=w2)
    experts = rk.PackedExperts(w1=first.w1, w2=first.w2, activation="gelu")
    assert experts.stacked is None
    assert_same_weights(experts.w1, w1)
    assert_same_weights(experts.w2, w2)


def test_products_of_two_forms(rng):
    """Each alone would be the kernel's."""
    w1, _ = both_products(64, rng)
    _, w2 = both_products(128, rng)
    experts = rk.PackedExperts(w1=w1, w2=w2)
    assert_same_weights(experts.w1, w1)
    assert_same_weights(experts.w2, w2)


def test_some_in_rows_of_codes_and_some_with_zero_points(rng):
    w1, w2 = both_products(64, rng)
    sizes = {"hidden": HIDDEN, "width": INTER}
    with_zeros = fragments(2 * INTER, HIDDEN, 64, rng, zeros=True)
    codes = rk.PackedExperts.part(w1[1], **sizes, activation="gelu")
    experts = rk.PackedExperts(w1=(with_zeros, codes, *w1[2:]), w2=w2)
    assert_same_weights(experts.w1[:1], (with_zeros,))
    assert_same_weights(experts.w2, w2)
    for mine, theirs in zip(experts.w1[1:], w1[1:], strict=True):
        found, scales, zeros = codes_layout.unpack(mine.data, mine.form)
        expected, expected_scales, _ = codes_layout.unpack(theirs.data, theirs.form)
        assert torch.equal(found, expected)
        assert torch.equal(scales, expected_scales)
        assert (zeros == 8).all()


def test_each_expert_is_written_into_its_place(rng):
    """Beside the result there are the parts of one expert and a copy of its numbers, no more."""
    w1, w2 = both_products(32, rng)
    experts, peak = peak_of(lambda: rk.PackedExperts(w1=w1, w2=w2, activation="gelu"))
    assert experts.stacks is not None
    largest = max(w1[0].nbytes, w2[0].nbytes)
    assert experts.nbytes <= peak <= experts.nbytes + 2 * largest


def test_a_stack_of_parts_is_not_copied(rng):
    w1, w2 = both_products(32, rng)
    sides = []
    for weights in (w1, w2):
        rows = torch.zeros(EXPERTS, weights[0].nbytes, dtype=torch.uint8)
        parts = []
        for row, weight in zip(rows, weights, strict=True):
            part = rk.PackedExperts.part(weight, hidden=HIDDEN, width=INTER, activation="gelu")
            parts.append(replace(part, data=row.copy_(part.data)))
        sides.append((tuple(parts), rows))
    (first, rows1), (second, rows2) = sides
    experts, peak = peak_of(lambda: rk.PackedExperts(w1=first, w2=second, activation="gelu"))
    assert [stack.data_ptr() for stack in experts.stacks] == [rows1.data_ptr(), rows2.data_ptr()]
    assert peak < w1[0].nbytes
