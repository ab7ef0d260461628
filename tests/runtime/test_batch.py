"""ForwardBatch against a plain numpy reading of the same plan."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from radix_runtime import batch as batch_module
from radix_runtime.batch import ForwardBatch
from radix_runtime.device import Device
from radix_runtime.errors import ConfigError
from radix_runtime.memory.kv_pool import KVPool
from radix_runtime.step_plan import StepPlan, decode_plan

CPU = Device.resolve("cpu")
MAX_ROWS, MAX_BATCH, MAX_TOKENS, MAX_CONTEXT, PAGES = 6, 4, 40, 50, 200


def make(page_size: int) -> ForwardBatch:
    pool = KVPool(
        num_layers=1,
        num_pages=PAGES,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=16,
        dtype=torch.float32,
        device=CPU,
    )
    batch = ForwardBatch(
        CPU,
        pool,
        max_tokens=MAX_TOKENS,
        max_batch=MAX_BATCH,
        max_rows=MAX_ROWS,
        max_context=MAX_CONTEXT,
    )
    for name, tensor in vars(batch).items():
        if isinstance(tensor, torch.Tensor) and name != "_table":
            tensor.fill_(-77)  # what a step does not fill must not be seen
    return batch


def random_plan(rng: random.Random, table: np.ndarray, page_size: int, step: int) -> StepPlan:
    """A step of random rows; writes its page deltas into `table` too."""
    rows = rng.sample(range(MAX_ROWS), rng.randint(1, MAX_BATCH))
    num_decode = rng.randint(0, len(rows))
    query = [1] * num_decode + [rng.randint(1, 9) for _ in rows[num_decode:]]
    kv = [rng.randint(n, MAX_CONTEXT) for n in query]
    deltas = []
    for row, length in zip(rows, kv, strict=True):
        for index in range(-(-length // page_size)):
            deltas.append((row, index, rng.randrange(PAGES)))
            table[row, index] = deltas[-1][2]
    prompt = [rng.randrange(1000) for _ in range(sum(query[num_decode:]))]
    columns = np.array(deltas, np.int32).reshape(-1, 3).T
    samples = [1] * num_decode + [rng.randint(0, 1) for _ in rows[num_decode:]]
    return StepPlan(
        step_id=step,
        num_decode=num_decode,
        rows=np.array(rows, np.int32),
        query_len=np.array(query, np.int32),
        kv_len=np.array(kv, np.int32),
        num_samples=np.array(samples, np.int32),
        input_ids=np.array(prompt, np.int32),
        page_rows=columns[0],
        page_index=columns[1],
        page_ids=columns[2],
    )


def check(batch: ForwardBatch, plan: StepPlan, table: np.ndarray, next_token: np.ndarray) -> None:
    page_size = batch.kv_pool.page_size
    prompt = iter(plan.input_ids)
    token = 0
    for entry, row in enumerate(plan.rows):
        count, kv = int(plan.query_len[entry]), int(plan.kv_len[entry])
        assert batch.cu_seqlens_q[entry] == token and batch.kv_lens[entry] == kv
        pages = -(-kv // page_size)
        assert batch.page_table[entry, :pages].tolist() == table[row, :pages].tolist()
        for position in range(kv - count, kv):
            is_decode = entry < plan.num_decode
            expected = max(next_token[row, 0], 0) if is_decode else next(prompt)
            assert batch.input_ids[token] == expected
            assert batch.positions[token] == position
            slot = int(table[row, position // page_size]) * page_size + position % page_size
            assert batch.slot_mapping[token] == slot
            token += 1
    ends = np.cumsum(plan.query_len) - 1
    sampling = plan.num_samples > 0
    assert batch.logit_rows.tolist() == ends[sampling].tolist()
    assert batch.sample_rows.tolist() == plan.rows[sampling].tolist()
    assert (batch.num_tokens, batch.batch_size) == (token, len(plan.rows))
    assert batch.max_query_len == plan.query_len.max() and batch.max_kv_len == plan.kv_len.max()


@pytest.mark.parametrize("packed_deltas", [16384, 7, 0])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_random_plans(page_size: int, packed_deltas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "_MAX_PACKED_DELTAS", packed_deltas)
    rng = random.Random(page_size)
    batch = make(page_size)
    table = np.full((MAX_ROWS, batch.max_pages), PAGES)
    for step in range(40):
        plan = random_plan(rng, table, page_size, step)
        next_token = np.array([[rng.randrange(-1, 1000)] for _ in range(MAX_ROWS + 1)], np.int32)
        batch.load(plan, torch.from_numpy(next_token))
        check(batch, plan, table, next_token)
        assert batch.input_ids.shape == (plan.num_tokens,)
        assert batch.cu_seqlens_q.shape == (len(plan.rows) + 1,)


def test_addresses_never_change() -> None:
    rng, batch = random.Random(0), make(16)
    table = np.full((MAX_ROWS, batch.max_pages), PAGES)
    names = ("input_ids", "positions", "slot_mapping", "cu_seqlens_q", "kv_lens", "page_table")
    names += ("logit_rows", "sample_rows")
    seen = set()
    for step in range(10):
        batch.load(
            random_plan(rng, table, 16, step), torch.zeros((MAX_ROWS + 1, 1), dtype=torch.int32)
        )
        seen.add(tuple(getattr(batch, name).storage_offset() for name in names))
        seen.add(tuple(getattr(batch, name).untyped_storage().data_ptr() for name in names))
    assert len(seen) == 2


def test_the_plan_may_be_reused_at_once() -> None:
    batch, table = make(16), np.full((MAX_ROWS, 4), PAGES)
    plan = random_plan(random.Random(3), table, 16, 0)
    batch.load(plan, torch.zeros((MAX_ROWS + 1, 1), dtype=torch.int32))
    before = batch.positions.clone(), batch.kv_lens.clone()
    plan.kv_len[:] = 0
    plan.rows[:] = 0
    assert torch.equal(before[0], batch.positions) and torch.equal(before[1], batch.kv_lens)


def test_the_last_of_two_pages_for_one_entry_wins() -> None:
    batch = make(16)
    plan = decode_plan([3], [40])
    plan.page_rows = np.array([3, 3, 3, 3, 3], np.int32)
    plan.page_index = np.array([0, 2, 1, 2, 0], np.int32)
    plan.page_ids = np.array([10, 11, 12, 13, 14], np.int32)
    batch.load(plan, torch.zeros((MAX_ROWS + 1, 1), dtype=torch.int32))
    assert batch.page_table.tolist() == [[14, 12, 13]]
    assert batch.slot_mapping.tolist() == [13 * 16 + 7]


@pytest.mark.parametrize(
    ("rows", "kv", "message"),
    [
        ([0, 1, 2, 3, 4], [1] * 5, "5 rows, the batch holds 4"),
        ([0], [MAX_CONTEXT + 1], "51 tokens of context, the batch holds 50"),
    ],
)
def test_a_step_that_does_not_fit(rows: list[int], kv: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(16).load(decode_plan(rows, kv), torch.zeros((MAX_ROWS + 1, 1), dtype=torch.int32))


def test_more_entries_than_an_index_can_count() -> None:
    sizes = {"max_tokens": 8, "max_batch": 1, "max_rows": 1 << 16}
    meta = Device("cpu", torch.device("meta"))
    pool = KVPool(
        num_layers=1,
        num_pages=1,
        page_size=1,
        num_kv_heads=1,
        head_dim=16,
        dtype=torch.bfloat16,
        device=meta,
    )
    with pytest.raises(
        ConfigError, match="see --max-total-tokens, --max-running-requests and --context-length"
    ):
        ForwardBatch(meta, pool, max_context=1 << 15, **sizes)


def test_kv_pool() -> None:
    shape = {"num_layers": 3, "page_size": 4, "num_kv_heads": 2, "head_dim": 16}
    pool = KVPool(num_pages=5, dtype=torch.bfloat16, device=CPU, **shape)
    assert len(pool.k) == len(pool.v) == 3 and pool.dummy_page == 5
    assert all(t.shape == (6, 4, 2, 16) and not t.any() for t in (*pool.k, *pool.v))
    held = sum(t.nbytes for t in (*pool.k, *pool.v))
    assert held == 6 * KVPool.page_bytes(dtype=torch.bfloat16, **shape)
