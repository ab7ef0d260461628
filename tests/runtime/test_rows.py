"""What is kept in columns: tokens of rows, the queue, the ids that end somebody."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_runtime.messages import Generate, pack_ids
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.scheduler.columns import Column
from radix_runtime.scheduler.live import StopIds
from radix_runtime.scheduler.request import Request
from radix_runtime.scheduler.rows import BLOCK, Flag, Rows
from radix_runtime.scheduler.waiting import WaitingQueue


def request(ids: list[int], seq: int = 0) -> Request:
    message = Generate(rid=str(seq), input_ids=pack_ids(ids), sampling=SamplingParams())
    return Request(
        message,
        choice=0,
        seq=seq,
        arrival=0.0,
        seed=0,
        max_total_len=10_000,
        stop_ids=frozenset(),
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    most=st.sampled_from([1, 3, BLOCK]),
    steps=st.integers(1, 200),
    seed=st.integers(0, 2**32),
)
def test_appended_tokens_are_the_requests_own(
    lengths: list[int], most: int, steps: int, seed: int
) -> None:
    """Whoever looks when: one token a row or several, across the borders of blocks, beside tokens
    that are appended to the request itself."""
    rng = random.Random(seed)
    rows = Rows(max_rows=8)
    expected: dict[int, list[int]] = {}
    for row, length in zip(rng.sample(range(8), len(lengths)), lengths, strict=True):
        expected[row] = [rng.randrange(1000) for _ in range(length)]
        entered = request(expected[row], seq=row)
        entered.row = row
        rows.enter(entered, 0)
    for _ in range(steps):
        chosen = rng.sample(sorted(expected), rng.randint(1, len(expected)))
        counts = [rng.randint(1, most) for _ in chosen]
        tokens = [rng.randrange(1000) for _ in range(sum(counts))]
        rows.append(np.array(chosen), np.array(counts), np.array(tokens, np.int32))
        for row, count in zip(chosen, counts, strict=True):
            expected[row] += tokens[:count]
            tokens = tokens[count:]
        looked_at = rng.choice(chosen)
        if rng.random() < 0.2:
            assert rows.request(looked_at).ids.tolist() == expected[looked_at]
        if rng.random() < 0.2:
            rows.request(looked_at).append(7)
            expected[looked_at].append(7)
    for row, ids in expected.items():
        left = rows.request(row)
        assert left.num_ids == len(ids) == rows.num_ids[row]
        rows.leave(left)
        rows.num_ids[row] = 0  # somebody else's
        rows.recent[row] = -1
        assert left.ids.tolist() == ids and left.ids.dtype == np.int32
        left.append(5)
        assert left.ids.tolist() == [*ids, 5] and left.num_ids == len(ids) + 1


def test_a_request_reads_and_writes_the_columns_of_its_row() -> None:
    rows = Rows(max_rows=3)
    one = request([1, 2, 3], seq=1 << 40)
    one.sent = 4
    one.row = 2
    rows.enter(one, Flag.IN_BLOCKS)
    assert (rows.seq[2], rows.prompt_len[2], rows.num_ids[2]) == (1 << 40, 3, 3)
    assert (rows.max_total_len[2], rows.sent[2], rows.last_step[2]) == (10_000, 4, -1)
    rows.computed_len[2] = 3
    one.total_len += 1
    assert one.computed_len == 3 and rows.total_len[2] == 4 and type(one.total_len) is int
    rows.leave(one)
    rows.computed_len[2] = 9
    one.num_pages = 1
    assert one.computed_len == 3 and rows.num_pages[2] == 0 and rows.requests == [None] * 3
    assert len(one.numbers) == len(Column)


def test_decoding_rows_stay_in_their_order_and_are_never_written() -> None:
    rows = Rows(max_rows=9)
    for row in (5, 1, 8, 3):
        rows.start_decoding(row)
    before = rows.decoding
    rows.stop_decoding(1)
    rows.stop_decoding(7)
    assert rows.decoding.tolist() == [5, 8, 3] and before.tolist() == [5, 1, 8, 3]


def test_the_queue_keeps_its_order_and_counts_its_tokens() -> None:
    rng = random.Random()
    queue = WaitingQueue()
    expected: list[Request] = []
    for seq in range(400):
        new = request([1] * rng.randint(1, 9), seq)
        if rng.random() < 0.3:
            queue.push_front(new)
            expected.insert(0, new)
        else:
            queue.append(new)
            expected.append(new)
        if rng.random() < 0.6:
            gone = rng.choice(expected)
            queue.remove(gone)
            expected.remove(gone)
            assert gone not in queue
            with pytest.raises(KeyError):
                queue.remove(gone)
        assert list(queue) == expected and len(queue) == len(expected)
        assert queue.num_tokens == sum(waiting.num_ids for waiting in expected)
    queue.clear()
    assert not queue and queue.num_tokens == 0


def test_ids_that_end_somebody_are_those_of_live_requests_and_no_ids() -> None:
    rng = random.Random()
    ids = StopIds(vocab_size=50)
    live: list[frozenset[int]] = []
    for _ in range(200):
        own = frozenset(rng.sample(range(50), rng.choice([0, 1, 5])))
        ids.add(own)
        live.append(own)
        if rng.random() < 0.8:
            ids.remove(live.pop(rng.randrange(len(live))))
        tokens = np.array(range(-3, 60), np.int32)
        found = ids.among(tokens) != 0
        known = frozenset().union(*live)
        wanted = [token in known or not 0 <= token < 50 for token in tokens.tolist()]
        assert found.tolist() == wanted
