"""The tensors of a step and its accepted tokens, against a plain reading of their definition."""

from __future__ import annotations

import pytest
import torch

import radix_kernels as rk
from tests.kernel.step_cases import (
    POISON,
    Step,
    expected_accept,
    expected_fill,
    random_samples,
    random_step,
)

REPEATS = 8


def filled(step: Step) -> dict[str, list]:
    rk.fill_step_tensors(*step.given, **step.made)
    got = {name: x.tolist() for name, x in step.made.items()}
    return {**got, "committed_len": step.committed_len.tolist()}


def same(got: dict[str, list], expected: dict[str, list]) -> None:
    """But for the length of the scratch row, the last, which many entries set."""
    got["committed_len"].pop()
    expected["committed_len"].pop()
    assert got == expected


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
@pytest.mark.parametrize(
    ("decodes", "chunks", "padding", "drafts"),
    [
        (1, 0, 0, 1),
        (5, 0, 0, 1),
        (3, 0, 5, 1),
        (4, 0, 0, 5),
        (0, 1, 0, 1),
        (0, 3, 4, 1),
        (4, 3, 2, 3),
        (300, 40, 7, 1),
    ],
)
def test_fill(page_size, decodes, chunks, padding, drafts, rng):
    for _ in range(REPEATS):
        step = random_step(
            rng,
            decodes=decodes,
            chunks=chunks,
            padding=padding,
            page_size=page_size,
            drafts=drafts,
        )
        expected = expected_fill(step)
        same(filled(step), expected)


@pytest.mark.parametrize("width", [0, 1, 3, 4, 8])
def test_narrow_page_tables(width, rng):
    """A page table may be narrower than a row can be, and its rows begin anywhere."""
    step = random_step(rng, decodes=5, chunks=2, padding=1, page_size=16, width=width)
    expected = expected_fill(step)
    same(filled(step), expected)


def test_what_is_not_written(rng):
    """Elements of the inputs stay, and committed lengths that nothing commits."""
    step = random_step(rng, decodes=6, chunks=3, padding=2, page_size=16, drafts=2)
    before = [x.clone() for x in step.given if isinstance(x, torch.Tensor)]
    commits = set(step.entries[3].tolist())
    filled(step)
    for was, now in zip(
        before, [x for x in step.given if isinstance(x, torch.Tensor)], strict=True
    ):
        if now is not step.committed_len:
            assert torch.equal(was, now)
    for row, (was, now) in enumerate(zip(before[4], step.committed_len, strict=True)):
        assert row in commits or was == now


def test_nothing_to_fill(rng):
    step = random_step(rng, decodes=0, chunks=0, padding=0, page_size=16)
    before = step.committed_len.clone()
    filled(step)
    assert torch.equal(step.committed_len, before)


def test_the_reference_is_the_definition(rng):
    for drafts in (1, 4):
        step = random_step(rng, decodes=5, chunks=3, padding=3, page_size=5, drafts=drafts)
        expected = expected_fill(step)
        rk.reference.fill_step_tensors(*step.given, **step.made)
        got = {name: x.tolist() for name, x in step.made.items()}
        same({**got, "committed_len": step.committed_len.tolist()}, expected)
        samples = random_samples(rng, 9, most=drafts, ragged=True)
        counts, next_token, committed = expected_accept(samples, all_drawn=False)
        got_counts = torch.full_like(samples.rows, POISON)
        rk.reference.accept_tokens(
            *samples.given,
            cu_samples=samples.cu_samples,
            drafts=samples.drafts,
            counts=got_counts,
        )
        assert got_counts.tolist() == counts
        assert samples.next_token.tolist() == next_token
        assert samples.committed_len.tolist() == committed


# Of `fill_step_tensors`: tensor, index, value outside of what it names.
OUTSIDE = [
    ("entries", (0, 1), 1000, "entry 1"),
    ("entries", (1, 0), -1, "entry 0"),
    ("entries", (3, 2), 1000, "entry 2"),
    ("tokens", (0, 1), -1, "token 1"),
    ("tokens", (2, 0), 10**6, "token 0"),
    ("tokens", (3, 1), -(10**6), "token 1"),
    ("tokens", (1, 1), -(10**6), "token 1"),
    ("sample_tokens", (1,), 1000, "sample 1"),
]


@pytest.mark.parametrize(("name", "index", "value", "what"), OUTSIDE)
def test_indices_outside(name, index, value, what, rng, request):
    """On the CPU nothing is written; on a GPU what names it is skipped."""
    step = random_step(rng, decodes=4, chunks=0, padding=0, page_size=16)
    getattr(step, name)[index] = value
    committed = step.committed_len.clone()
    if request.config.getoption("--device") == "cpu":
        with pytest.raises((ValueError, IndexError), match=f"{what}|index"):
            filled(step)
        assert all((x == POISON).all() for x in step.made.values())
        assert torch.equal(step.committed_len, committed)
        return
    filled(step)
    skipped = {"entry": "kv_lens", "token": "positions", "sample": "sample_positions"}
    kind, at = what.split()
    assert step.made[skipped[kind]][int(at)] == POISON
    assert step.made[skipped[kind]][3] != POISON
    if (name, index) == ("entries", (0, 1)):
        assert (step.made["page_table"][1] == POISON).all()


@pytest.mark.parametrize("all_drawn", [False, True])
@pytest.mark.parametrize(("most", "ragged"), [(1, False), (3, False), (1, True), (4, True)])
@pytest.mark.parametrize("entries", [1, 7, 300])
def test_accept(entries, most, ragged, all_drawn, rng):
    for _ in range(REPEATS):
        samples = random_samples(rng, entries, most=most, ragged=ragged)
        counts, next_token, committed = expected_accept(samples, all_drawn=all_drawn)
        got = rk.accept_tokens(
            *samples.given,
            cu_samples=samples.cu_samples,
            drafts=samples.drafts,
            all_drawn=all_drawn,
        )
        assert got is None if not ragged else got.tolist() == counts
        assert samples.next_token.tolist() == next_token
        assert samples.committed_len.tolist() == committed


def test_given_counts(rng):
    samples = random_samples(rng, 5, most=3, ragged=False)
    counts = torch.full((5,), POISON, dtype=torch.int32)
    assert rk.accept_tokens(*samples.given, counts=counts) is counts
    assert counts.tolist() == [1] * 5


def test_nothing_to_accept(rng):
    samples = random_samples(rng, 0, most=3, ragged=False)
    before = samples.committed_len.clone()
    assert rk.accept_tokens(*samples.given) is None
    assert torch.equal(samples.committed_len, before)


@pytest.mark.parametrize("name", ["rows", "grow_rows"])
@pytest.mark.parametrize("value", [-1, 1000])
def test_accepting_rows_outside(name, value, rng, request):
    samples = random_samples(rng, 4, most=2, ragged=False)
    samples.ids.abs_()
    getattr(samples, name)[2] = value
    before = samples.next_token.clone()
    if request.config.getoption("--device") == "cpu":
        with pytest.raises((ValueError, IndexError), match="entry 2|index"):
            rk.accept_tokens(*samples.given)
        assert torch.equal(samples.next_token, before)
        return
    rk.accept_tokens(*samples.given)
    others = [0, 1, 3]
    rows = samples.rows[others].long()
    assert torch.equal(samples.next_token[rows, 0], samples.ids[others])


def wrong_fill(**change):
    step = random_step(torch.Generator(), decodes=3, chunks=0, padding=0, page_size=16)
    names = "entries tokens sample_tokens next_token committed_len row_pages page_size".split()
    args = dict(zip(names, step.given, strict=True), **step.made)
    rk.fill_step_tensors(**{**args, **change})


I32 = torch.int32


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"page_size": 0}, ValueError, "page_size is 0"),
        ({"entries": torch.zeros(3, 3, dtype=I32)}, ValueError, "entries"),
        ({"tokens": torch.zeros(4, 3)}, TypeError, "tokens"),
        ({"tokens": torch.zeros(4, 6, dtype=I32)[:, ::2]}, ValueError, "tokens"),
        ({"kv_lens": torch.zeros(2, dtype=I32)}, ValueError, "kv_lens"),
        ({"slot_mapping": torch.zeros(3, dtype=I32)}, TypeError, "slot_mapping"),
        ({"positions": torch.zeros(4, dtype=I32)}, ValueError, "positions"),
        ({"page_table": torch.zeros(3, 900, dtype=I32)}, ValueError, "page_table"),
        ({"sample_positions": torch.zeros(3, dtype=I32)}, TypeError, "sample_positions"),
        ({"committed_len": torch.zeros(3, 1, dtype=I32)}, ValueError, "committed_len"),
    ],
)
def test_wrong_arguments_of_fill(change, error, text):
    with pytest.raises(error, match=text):
        wrong_fill(**change)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"ids": torch.zeros(2, dtype=I32)}, ValueError, "rows"),
        ({"rows": torch.zeros(3)}, TypeError, "rows"),
        ({"grow_rows": torch.zeros(2, dtype=I32)}, ValueError, "grow_rows"),
        ({"next_token": torch.zeros(4, 1, dtype=I32)}, ValueError, "next_token"),
        ({"next_token": torch.zeros(5, 0, dtype=I32)}, ValueError, "next_token has no columns"),
        ({"drafts": torch.zeros(3, dtype=I32)}, ValueError, "go together"),
        ({"counts": torch.zeros(2, dtype=I32)}, ValueError, "counts"),
    ],
)
def test_wrong_arguments_of_accept(change, error, text):
    samples = random_samples(torch.Generator(), 3, most=1, ragged=False)
    names = "ids rows grow_rows next_token committed_len".split()
    args = dict(zip(names, samples.given, strict=True))
    with pytest.raises(error, match=text):
        rk.accept_tokens(**{**args, **change})
