"""What crosses between the processes: packed ids, logprobs, batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_runtime.messages import (
    MOST_DELTAS,
    Logprobs,
    RequestFailed,
    TextDelta,
    batches,
    num_ids,
    pack_ids,
    slice_ids,
    unpack_ids,
)

ids = st.lists(st.integers(0, 2**31 - 1), max_size=8)
bounds = st.integers(-10, 10)


@given(ids=ids, start=bounds, stop=st.none() | bounds)
def test_packed_ids_are_counted_and_sliced_as_a_list(
    ids: list[int], start: int, stop: int | None
) -> None:
    packed = pack_ids(ids)
    assert unpack_ids(packed).tolist() == ids and num_ids(packed) == len(ids)
    assert slice_ids(packed, start, stop) == pack_ids(ids[start:stop])


def scores(first: int, count: int, top_n: int) -> Logprobs:
    """Of tokens first, first + 1, ...; all numbers differ."""
    own = np.arange(first, first + count)
    top = np.arange(first * top_n, (first + count) * top_n)
    return Logprobs(
        ids=pack_ids(own),
        logprobs=(-own).astype("<f4").tobytes(),
        top_n=top_n,
        top_ids=pack_ids(top),
        top_logprobs=(-top).astype("<f4").tobytes(),
    )


@pytest.mark.parametrize("top_n", [0, 1, 3])
def test_logprobs_are_cut_and_joined_by_tokens(top_n: int) -> None:
    whole = scores(0, 5, top_n)
    assert whole.head(2) == scores(0, 2, top_n)
    assert whole.head(0) == scores(0, 0, top_n)
    head = whole.head(2)
    head.extend(scores(2, 1, top_n))
    head.extend(scores(3, 2, top_n))
    assert head == whole
    assert whole.values().tolist() == [0, -1, -2, -3, -4]
    assert whole.top_values().shape == (5, top_n)
    assert scores(0, 0, top_n).top_values().shape == (0, top_n)


def test_a_failure_becomes_the_error_of_the_client() -> None:
    failed = RequestFailed(
        rid="r",
        status=503,
        code="engine_overloaded",
        message="x" * 1000,
        param="prompt",
        retry_after=3,
    )
    error = failed.to_error()
    assert (error.status, error.code, error.param) == (503, "engine_overloaded", "prompt")
    assert (error.retry_after, error.type) == (3, "overloaded_error")
    assert error.message == "x" * 300


def test_batches_are_bounded_and_prompt_logprobs_end_one() -> None:
    deltas = [TextDelta(rid=str(i), choice=0, ids=b"") for i in range(2 * MOST_DELTAS + 1)]
    deltas[3].prompt_logprobs = Logprobs()
    found = list(batches(deltas))
    assert [delta for batch in found for delta in batch] == deltas
    assert [len(batch) for batch in found] == [4, MOST_DELTAS, MOST_DELTAS - 3]
    assert list(batches([])) == []
