"""The draw in Triton: in its interpreter on the CPU, or on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch

import radix_kernels as rk
from tests.kernel.sampling_cases import FILTERS, Row, columns_of, near_tie, random_row, some_edits
from tests.kernel.triton_device import DEVICE, GPU, triton_module

rt = triton_module("sampling")


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy under the interpreter


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks a row, as real vocabularies have."""
    if not GPU:
        monkeypatch.setattr(rt, "BLOCK", 256)


def draw(logits: torch.Tensor, rows: list[Row], **options) -> torch.Tensor:
    out = torch.full((len(rows),), -7, dtype=torch.int32, device=DEVICE)
    stream = options.pop("stream", 0)
    rt.top_k_top_p_sampling(
        logits.to(DEVICE), *(c.to(DEVICE) for c in columns_of(rows)), stream, out, **options
    )
    return out.cpu()


def check(logits: torch.Tensor, rows: list[Row], stream: int = 0) -> None:
    want = rk.reference.top_k_top_p_sampling(logits, *columns_of(rows), stream=stream)
    got = draw(logits, rows, stream=stream)
    for i in torch.nonzero(got != want).flatten().tolist():
        assert near_tie(logits[i], rows[i]), vars(rows[i])


@pytest.mark.parametrize(("vocab_size", "count"), [(1, 2), (5, 2), (257, 4), (601, 8)])
def test_draws_equal_the_reference(vocab_size, count, rng):
    rows = [random_row(rng) for _ in range(50 * count if GPU else count)]
    logits = 3 * torch.randn(len(rows), vocab_size + 3, generator=rng)
    check(logits[:, :vocab_size], rows, stream=2)  # strided


def test_every_filter(rng):
    rows = [
        Row(seed=7 * i, position=i, temperature=0.7 + 0.1 * i, **f) for i, f in enumerate(FILTERS)
    ]
    vocab_size = 151_936 if GPU else 300
    check(2 * torch.randn(len(rows), vocab_size, generator=rng), rows)


@pytest.mark.parametrize(
    "filters", [{"top_k": 3}, {"top_p": 0.45}, {"top_k": 200, "top_p": 0.5}], ids=str
)
def test_ties_at_the_border_keep_the_lowest_ids(filters, rng):
    """All logits are equal: what stays is a range of ids."""
    rows = [Row(seed=i, **filters) for i in range(200 if GPU else 2)]
    logits = torch.zeros(len(rows), 300)
    check(logits, rows)
    assert int(draw(logits, rows).max()) < 136


def test_greedy_and_rows_without_an_answer(rng):
    logits = torch.randn(6, 300, generator=rng)
    logits[0, [200, 30]] = 50  # the lowest of equals
    logits[1, 7] = float("nan")
    logits[2, 299] = float("inf")
    logits[3] = -float("inf")
    logits[4] = -float("inf")
    logits[4, 123] = -3e38
    logits[5, 77] = 3e38  # divided by the temperature: infinite, so greedy
    rows = [Row(temperature=0.0), Row(), Row(), Row(), Row(), Row(temperature=1e-3, top_k=5)]
    assert draw(logits, rows).tolist() == [30, -1, -1, -1, 123, 77]


def test_tiny_temperatures_and_large_min_p(rng):
    """No normal number is greedy; of equals the first has every min-p."""
    logits = torch.rand(3, 300, generator=rng) * 0.2
    logits[:, [200, 30]] = 0.3
    rows = [
        Row(temperature=4e-39, seed=1),
        Row(temperature=4e-39, seed=2, top_p=0.5),
        Row(seed=3, min_p=1.5),
    ]
    assert draw(logits, rows).tolist() == [30] * 3


def test_infinite_temperature(rng):
    allowed = torch.tensor([3, 70, 280])
    logits = torch.full((len(FILTERS), 300), -float("inf"))
    logits[:, allowed] = torch.randn(len(FILTERS), 3, generator=rng)
    rows = [Row(seed=i, temperature=float("inf"), **f) for i, f in enumerate(FILTERS)]
    assert torch.isin(draw(logits, rows), allowed).all()
    check(logits, rows)


def test_edits_and_logprobs(rng):
    rows = [random_row(rng) for _ in range(3)]
    logits = torch.randn(3, 67, generator=rng)
    edits = some_edits(3, 67, rng)
    there = tuple(None if t is None else t.to(DEVICE) for t in edits.flat())
    logprobs = tuple(
        torch.zeros(3, *n, device=DEVICE, dtype=t)
        for n, t in (((), torch.float32), ((4,), torch.float32), ((4,), torch.int32))
    )
    got = draw(logits, rows, edits=there, logprobs=logprobs)
    columns = columns_of(rows)
    edited = rk.reference.edited_logits(logits, columns[-1], edits, compute_dtype=torch.float32)
    assert torch.equal(got, rk.reference.top_k_top_p_sampling(edited, *columns))
    for found, want in zip(logprobs, rk.reference.token_logprobs(logits, got, 4), strict=True):
        assert torch.allclose(found.cpu(), want, atol=1e-5)


def test_errors(rng):
    with pytest.raises(TypeError, match="logits"):
        draw(torch.zeros(1, 4, dtype=torch.float64), [Row()])
    with pytest.raises(ValueError, match="stream"):
        draw(torch.zeros(1, 4), [Row()], stream=-1)
