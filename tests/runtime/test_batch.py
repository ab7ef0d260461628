"""ForwardBatch against a plain numpy reading of the same plan."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from radix_runtime import batch as batch_module
from radix_runtime.batch import ForwardBatch
from radix_runtime.device import Device
from radix_runtime.errors import ConfigError
from radix_runtime.step_plan import StepPlan, decode_plan, prefill_plan
from radix_runtime.step_shape import StepShape
from tests.runtime.pools import gqa_pool


class FakeGpu(Device):
    """The CPU, called a GPU: the batch uploads to it."""

    def host_empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


CPU = Device.resolve("cpu")
GPU = FakeGpu("cuda", torch.device("cpu"))
MAX_ROWS = 6
MAX_BATCH = 4
MAX_TOKENS = 48
MAX_CONTEXT = 50
PAGES = 200
on_each_device = pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])


def make(
    page_size: int, *, max_samples: int = 3, expands_decode: bool = True, device: Device = CPU
) -> ForwardBatch:
    pool = gqa_pool(
        CPU,
        num_layers=1,
        num_pages=PAGES,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=16,
        dtype=torch.float32,
    )
    batch = ForwardBatch(
        device,
        pool,
        max_tokens=MAX_TOKENS,
        max_batch=MAX_BATCH,
        max_rows=MAX_ROWS,
        max_context=MAX_CONTEXT,
        max_samples=max_samples,
        expands_decode=expands_decode,
    )
    for tensor in vars(batch).values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(-77)  # what a step does not fill must not be seen
    return batch


class Rows:
    """What the device knows of the rows, as numpy, and the page table."""

    def __init__(self, rng: random.Random, page_size: int, max_samples: int = 3) -> None:
        self.rng = rng
        self.page_size = page_size
        self.table = np.full((MAX_ROWS + 1, -(-MAX_CONTEXT // page_size)), PAGES)
        self.committed_len = np.zeros(MAX_ROWS + 2, np.int32)
        ids = [[rng.randrange(-1, 1000) for _ in range(max_samples)] for _ in range(MAX_ROWS)]
        none = [0] * max_samples
        self.next_token = np.array([*ids, none, none], np.int32)

    def load(self, batch: ForwardBatch, plan: StepPlan, **options: Any) -> None:
        """Loads `plan`; the chunks' lengths must have become the committed ones."""
        committed = torch.from_numpy(self.committed_len.copy())
        batch.upload(plan, **options)
        batch.fill(torch.from_numpy(self.next_token), committed)
        expected = self.committed_len.copy()
        expected[plan.rows[plan.num_decode :]] = plan.kv_len[plan.num_decode :]
        assert committed.tolist()[:-1] == expected.tolist()[:-1]  # but for the scratch row

    def plan(self, step: int, like: StepPlan | None = None) -> StepPlan:
        """A step of random entries, or of those of `like` with other lengths and pages. The lengths
        of decode entries are upper bounds."""
        rng = self.rng
        rows = rng.sample(range(MAX_ROWS), rng.randint(1, MAX_BATCH))
        num_decode = rng.choice([rng.randint(0, len(rows)), len(rows)])
        query = [rng.randint(1, self.next_token.shape[1]) for _ in range(num_decode)]
        query += [rng.randint(1, 9) for _ in rows[num_decode:]]
        if like is not None:
            rows, num_decode = like.rows.tolist(), like.num_decode
            query = like.query_len.tolist()
        kv = [rng.randint(n, MAX_CONTEXT) for n in query]
        for row, n, length in zip(rows[:num_decode], query, kv, strict=False):
            self.committed_len[row] = rng.randint(max(0, length - n - 3), length - n)
        columns = np.array(self._pages(rows, kv), np.int32).reshape(-1, 3).T
        samples = query[:num_decode] + [rng.randint(0, 1) for _ in rows[num_decode:]]
        prompt = [rng.randrange(1000) for _ in range(sum(query[num_decode:]))]
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

    def _pages(self, rows: list[int], kv: list[int]) -> list[tuple[int, int, int]]:
        deltas = []
        for row, length in zip(rows, kv, strict=True):
            for index in range(-(-length // self.page_size)):
                page = self.rng.randrange(PAGES)
                deltas.append((row, index, page))
                self.table[row, index] = page
        return deltas

    def expected(
        self, plan: StepPlan, expands: bool, padding: int
    ) -> list[tuple[int, list[int], int, bool]]:
        """(row, ids, position of the first, whether it is stored) of the batch's entries, of which
        `padding` are padding."""
        prompt = plan.input_ids.tolist()
        decode, chunks = [], []
        for entry, row in enumerate(plan.rows.tolist()):
            n = int(plan.query_len[entry])
            start = int(self.committed_len[row])
            if entry >= plan.num_decode:
                chunks.append((row, prompt[:n], int(plan.kv_len[entry]) - n, True))
                prompt = prompt[n:]
            elif expands:
                ids = np.maximum(self.next_token[row], 0).tolist()
                decode += [(row, [ids[j]], start + j, True) for j in range(n)]
            else:
                decode.append((row, np.maximum(self.next_token[row, :n], 0).tolist(), start, True))
        return decode + chunks + [(MAX_ROWS, [] if chunks else [0], 0, False)] * padding


def check(batch: ForwardBatch, plan: StepPlan, rows: Rows, shape: StepShape | None = None) -> None:
    page_size = batch.kv_pool.page_size
    padding = 0 if shape is None else shape.entries - len(plan.rows)
    entries = rows.expected(plan, batch.limits.expands_decode, padding)
    token = 0
    for entry, (row, ids, start, stored) in enumerate(entries):
        kv = start + len(ids)
        assert batch.rows[entry] == row
        assert batch.cu_seqlens_q[entry] == token and batch.kv_lens[entry] == kv
        pages = -(-kv // page_size)
        assert batch.page_table[entry, :pages].tolist() == rows.table[row, :pages].tolist()
        for position, expected in enumerate(ids, start):
            assert batch.input_ids[token] == expected
            assert batch.positions[token] == position
            page = int(rows.table[row, position // page_size])
            slot = page * page_size + position % page_size
            assert batch.slot_mapping[token] == (slot if stored else -1)
            token += 1
    assert batch.cu_seqlens_q.tolist()[-1] == token
    border = int(batch.cu_seqlens_q[len(entries) if not batch.has_chunks else batch.num_decode])
    assert batch.decode_cu_seqlens.tolist() == batch.cu_seqlens_q.clamp(max=border).tolist()
    assert batch.chunk_cu_seqlens.tolist() == batch.cu_seqlens_q.clamp(min=border).tolist()
    assert batch.batch_size == len(entries)
    assert batch.cu_seqlens_q.diff().tolist() == [len(ids) for _, ids, _, _ in entries]
    assert batch.max_kv_len == plan.kv_len.max()
    if shape is None:
        longest = max(len(ids) for _, ids, _, _ in entries)
        assert (batch.num_tokens, batch.max_query_len) == (token, longest)
    check_padding(batch, plan, token, shape)
    check_samples(batch, plan, shape)


def check_padding(batch: ForwardBatch, plan: StepPlan, used: int, shape: StepShape | None) -> None:
    """What a shape decides is the same for all its steps; padding tokens are not stored."""
    chunks = len(plan.rows) - plan.num_decode
    assert batch.num_padding == batch.num_tokens - plan.num_tokens
    assert batch.slot_mapping[plan.num_tokens :].tolist() == [-1] * batch.num_padding
    assert batch.input_ids[used:].tolist() == [0] * (batch.num_tokens - used)
    assert batch.positions[used:].tolist() == [0] * (batch.num_tokens - used)
    if shape is None:
        assert batch.num_decode == batch.batch_size - chunks
        return
    assert (batch.num_tokens, batch.batch_size) == (shape.tokens, shape.entries)
    assert batch.num_decode == (plan.num_decode if chunks else shape.entries)
    assert batch.max_query_len == (shape.tokens if chunks else 1)


def check_samples(batch: ForwardBatch, plan: StepPlan, shape: StepShape | None) -> None:
    """The last `num_samples` tokens of each entry give its samples."""
    logit_rows: list[int] = []
    cu_samples = [0]
    sample_rows = []
    grow_rows = []
    end = 0
    for entry, n in enumerate(plan.num_samples.tolist()):
        end += int(plan.query_len[entry])
        if n:
            logit_rows += range(end - n, end)
            cu_samples.append(len(logit_rows))
            sample_rows.append(int(plan.rows[entry]))
            grow_rows.append(sample_rows[-1] if entry < plan.num_decode else MAX_ROWS + 1)
        if entry >= plan.num_decode:
            assert batch.first_token(plan, entry) == end - plan.query_len[entry]
    positions = [int(batch.positions[token]) + 1 for token in logit_rows]
    assert batch.sample_positions[: len(logit_rows)].tolist() == positions
    assert batch.cu_samples.tolist() == cu_samples
    if shape is not None:
        logit_rows += [0] * (shape.sample_capacity - len(logit_rows))
        scratch = [MAX_ROWS + 1] * (shape.samples - len(sample_rows))
        sample_rows += scratch
        grow_rows += scratch
    assert batch.logit_rows.tolist() == logit_rows
    is_decode = shape is None and plan.num_decode == len(plan.rows)
    assert batch.samples_every_token == is_decode
    assert not is_decode or logit_rows == list(range(batch.num_tokens))
    assert batch.rows_of_samples.tolist() == np.repeat(plan.rows, plan.num_samples).tolist()
    assert batch.sample_rows.tolist() == sample_rows
    assert batch.grow_rows.tolist() == grow_rows
    assert batch.num_decode_rows == plan.num_decode


@pytest.mark.parametrize(
    ("device", "packed"),
    [(CPU, 16384), (GPU, 16384), (GPU, 7), (GPU, 0)],
    ids=["cpu", "gpu", "7 packed", "none packed"],
)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("expands", [True, False])
def test_random_plans(
    page_size: int, device: Device, packed: int, expands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "_MAX_PACKED_DELTAS", packed)
    rng = random.Random(page_size)
    batch = make(page_size, expands_decode=expands, device=device)
    rows = Rows(rng, page_size)
    plan = None
    for step in range(60):
        again = plan if rng.random() < 0.4 else None  # as decode steps mostly do
        plan = rows.plan(step, like=again)
        rows.load(batch, plan)
        check(batch, plan, rows)


@on_each_device
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_padded_plans(page_size: int, device: Device) -> None:
    rng = random.Random(page_size)
    batch = make(page_size, max_samples=1, device=device)
    rows = Rows(rng, page_size, max_samples=1)
    plan = None
    for step in range(80):
        again = plan if rng.random() < 0.4 else None
        plan = rows.plan(step, like=again)
        sizes = [len(plan.rows), MAX_BATCH]
        size = rng.choice(sizes)
        shape = StepShape(tokens=size, entries=size, samples=size, has_chunks=False)
        if plan.num_decode < len(plan.rows):
            tokens = rng.choice([plan.num_tokens, plan.num_tokens + 1, MAX_TOKENS])
            samples = rng.randint(int(plan.num_samples.sum()), MAX_BATCH)
            shape = StepShape(tokens=tokens, entries=MAX_BATCH, samples=samples, has_chunks=True)
        chosen = rng.choice([None, shape, shape])
        rows.load(batch, plan, shape=chosen)
        check(batch, plan, rows, chosen)


def test_addresses_never_change() -> None:
    rng = random.Random(0)
    batch, rows = make(16), Rows(rng, 16)
    names = ["input_ids", "positions", "slot_mapping", "cu_seqlens_q", "kv_lens", "page_table"]
    names += ["logit_rows", "sample_rows", "grow_rows", "cu_samples", "rows"]
    names += ["decode_cu_seqlens", "chunk_cu_seqlens", "sample_positions"]
    seen = set()
    for step in range(10):
        rows.load(batch, rows.plan(step))
        seen.add(tuple(getattr(batch, name).storage_offset() for name in names))
        seen.add(tuple(getattr(batch, name).untyped_storage().data_ptr() for name in names))
    assert len(seen) == 2


def test_the_plan_may_be_reused_at_once() -> None:
    batch, rows = make(16), Rows(random.Random(3), 16)
    plan = rows.plan(0)
    rows.load(batch, plan)
    before = batch.positions.clone(), batch.kv_lens.clone()
    plan.kv_len[:] = 0
    plan.rows[:] = 0
    assert torch.equal(before[0], batch.positions) and torch.equal(before[1], batch.kv_lens)


@on_each_device
def test_a_step_like_the_last_copies_only_its_pages(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, rows = make(16, device=device), Rows(random.Random(3), 16)
    uploads: list[int] = []
    upload = batch._copy

    def counted(target: torch.Tensor, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        uploads.append(sum(array.size for array in arrays))
        return upload(target, arrays)

    monkeypatch.setattr(batch, "_copy", counted)
    plan = decode_plan([3, 1], [9, 9])
    rows.load(batch, plan)
    rows.committed_len[[3, 1]] = 9, 12
    rows.load(batch, decode_plan([3, 1], [10, 13]))
    assert batch.positions.tolist() == [9, 12] and len(uploads) == 1
    delta = decode_plan([3, 1], [17, 13])
    delta.page_rows = np.array([3], np.int32)
    delta.page_index = np.array([1], np.int32)
    delta.page_ids = np.array([8], np.int32)
    rows.committed_len[3] = 16
    rows.load(batch, delta)
    # What is in the host's memory is written there.
    assert uploads[1:] == ([] if device is CPU else [2])
    assert batch.slot_mapping[0] == 8 * 16
    with pytest.raises(ValueError, match="51 tokens of context"):
        rows.load(batch, decode_plan([3, 1], [51, 13]))
    before = len(uploads)
    rows.load(batch, decode_plan([3, 0], [17, 13]))
    assert len(uploads) == before + 1 and batch.rows.tolist() == [3, 0]


def test_a_chunk_samples_once() -> None:
    plan = prefill_plan([1], [[5, 6, 7]])
    plan.num_samples[:] = 2
    with pytest.raises(ValueError, match="after its last token only"):
        Rows(random.Random(0), 16).load(make(16), plan)


@on_each_device
def test_the_last_of_two_pages_for_one_entry_wins(device: Device) -> None:
    batch = make(16, device=device)
    plan = decode_plan([3], [40])
    plan.page_rows = np.array([3, 3, 3, 3, 3], np.int32)
    plan.page_index = np.array([0, 2, 1, 2, 0], np.int32)
    plan.page_ids = np.array([10, 11, 12, 13, 14], np.int32)
    rows = Rows(random.Random(0), 16)
    rows.committed_len[3] = 39
    rows.load(batch, plan)
    unused = [] if device is CPU else [PAGES] * (batch.limits.max_pages - 3)
    assert batch.page_table.tolist() == [[14, 12, 13, *unused]]
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
        Rows(random.Random(0), 16).load(make(16), decode_plan(rows, kv))


def test_padding_and_drafts_that_do_not_fit() -> None:
    rows = Rows(random.Random(0), 16)
    plan = decode_plan([1, 2], [5, 5])
    for size, has_chunks in ((1, False), (3, True)):
        shape = StepShape(tokens=size, entries=size, samples=size, has_chunks=has_chunks)
        with pytest.raises(ValueError, match="step -1 does not fit StepShape"):
            rows.load(make(16), plan, shape=shape)
    with pytest.raises(ValueError, match="13 entries, the batch holds 12"):
        shape = StepShape(tokens=13, entries=13, samples=13, has_chunks=False)
        rows.load(make(16), plan, shape=shape)
    with pytest.raises(ValueError, match="16 entries, the batch holds 12"):
        rows.load(make(16), decode_plan([0, 1, 2, 3], [5] * 4, query_len=4))


def test_a_decode_entry_samples_after_every_token() -> None:
    plan = decode_plan([1], [5], query_len=2)
    plan.num_samples[:] = 1
    with pytest.raises(ValueError, match="samples after every token"):
        Rows(random.Random(0), 16).load(make(16), plan)


def test_more_entries_than_an_index_can_count() -> None:
    sizes = {"max_tokens": 8, "max_batch": 1, "max_rows": 1 << 16}
    meta = Device("cpu", torch.device("meta"))
    pool = gqa_pool(
        meta,
        num_layers=1,
        num_pages=1,
        page_size=1,
        num_kv_heads=1,
        head_dim=16,
        dtype=torch.bfloat16,
    )
    with pytest.raises(
        ConfigError, match="see --max-total-tokens, --max-running-requests and --context-length"
    ):
        ForwardBatch(meta, pool, max_context=1 << 15, **sizes)
