"""An Executor without a model: a wrong or stale KV page becomes a wrong token.

The KV of position t is a running hash of all tokens up to t, built on the hash read at t - 1
*through the page table*. A token is sampled from a fold over every KV entry it attends to, read
through the engine's own mirror of the page table, which knows only what StepPlans told it. Plans
are encoded at launch and decoded when the step runs, so nothing the scheduler changes afterwards
can reach a step in flight. `oracle` gives the same tokens from the prompt alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from radix_runtime.messages import Generate, unpack_ids
from radix_runtime.sampling_params import SamplingParams, splitmix64
from radix_runtime.step_plan import (
    RowSampling,
    StepPlan,
    StepResult,
    deserialize_plan,
    serialize_plan,
)

_A = np.uint64(0x9E3779B97F4A7C15)
_B = np.uint64(0xBF58476D1CE4E5B9)
_C = np.uint64(0x94D049BB133111EB)
MASK = (1 << 64) - 1


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64 arrays (wraps around)."""
    x = (x + _A).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * _B
    x = (x ^ (x >> np.uint64(27))) * _C
    return x ^ (x >> np.uint64(31))


def token_hashes(ids: np.ndarray, start: int) -> np.ndarray:
    """uint64 [n]: what each token at its position adds to the running hash."""
    positions = np.arange(start, start + len(ids), dtype=np.uint64)
    return mix(ids.astype(np.uint64) * _B + positions * _C)


def kv_of(ids: np.ndarray) -> np.ndarray:
    """uint64 [n]: the KV of a sequence."""
    return np.cumsum(token_hashes(np.asarray(ids), 0), dtype=np.uint64)


def fold(kv: np.ndarray) -> int:
    """Everything a token attends to, in order, as one number."""
    weights = np.arange(1, 2 * len(kv), 2, dtype=np.uint64)
    return int((mix(kv) * weights).sum(dtype=np.uint64))


def pick(folded: int, position: int, vocab: int, seed: int, masked: frozenset[int]) -> int:
    """The token at `position`; `seed` 0 is greedy; masked ids cannot come."""
    x = splitmix64((folded ^ seed) + position & MASK)
    while x % vocab in masked:
        x = splitmix64(x)
    return x % vocab


def fake_logprob(folded: int, token: int) -> float:
    return -float((folded ^ token * 0x9E3779B1) % 9973) / 997


def fake_top(folded: int, n: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([(folded + 7 * i) % vocab for i in range(n)], np.int32)
    values = np.array([fake_logprob(folded, int(i)) for i in ids], np.float32)
    return ids, values


@dataclass
class Handle:
    engine: FakeEngine
    step_id: int

    def done(self) -> bool:
        return self.step_id in self.engine.results

    def result(self) -> StepResult:
        self.engine.run_until(self.step_id)
        return self.engine.results.pop(self.step_id)


@dataclass
class FakeEngine:
    """`lazy`: a step runs as late as it can, when its result is asked for. `nan_rows`: called with
    (step_id, row), True gives that row no finite logits."""

    num_pages: int = 64
    page_size: int = 4
    max_rows: int = 8
    max_context: int = 256
    vocab_size: int = 97
    max_samples: int = 1
    lazy: bool = True
    nan_rows: Callable[[int, int], bool] = lambda step, row: False
    steps: list[tuple[int, int, int]] = field(default_factory=list)  # decode rows, rows, tokens
    results: dict[int, StepResult] = field(default_factory=dict)
    closed: bool = False

    def __post_init__(self) -> None:
        slots = (self.num_pages + 1) * self.page_size
        self.kv = np.full(slots, 0xDEAD, np.uint64)
        longest = min(self.max_context, self.num_pages * self.page_size)
        self.table = np.full((self.max_rows, -(-longest // self.page_size)), -1, np.int64)
        self.next_token = np.full(self.max_rows, -(10**6), np.int64)
        self.sampling: dict[int, RowSampling] = {}
        self.queue: list[tuple[int, bytes]] = []
        self.garbage = np.random.default_rng(0)
        self.last_step = -1

    def launch(self, plan: StepPlan) -> Handle:
        assert plan.step_id == self.last_step + 1, "steps are numbered without a gap"
        self.last_step = plan.step_id
        self.steps.append((plan.num_decode, len(plan.rows), plan.num_tokens))
        self.queue.append((plan.step_id, serialize_plan(plan)))
        if not self.lazy:
            self.run_until(plan.step_id)
        return Handle(self, plan.step_id)

    def close(self) -> None:
        self.closed = True

    def poison(self, pages: np.ndarray) -> None:
        """Fills pages that nobody may read any more with garbage."""
        slots = self._slots(np.asarray(pages, np.int64)).reshape(-1)
        self.kv[slots] = self.garbage.integers(0, 2**63, len(slots), dtype=np.uint64)

    def run_until(self, step_id: int) -> None:
        while self.queue and self.queue[0][0] <= step_id:
            _, frame = self.queue.pop(0)
            plan = deserialize_plan(frame)
            self.results[plan.step_id] = self._run(plan)

    def _slots(self, pages: np.ndarray) -> np.ndarray:
        return pages[..., None] * self.page_size + np.arange(self.page_size)

    def row_slots(self, row: int, length: int) -> np.ndarray:
        pages = self.table[row, : -(-length // self.page_size)]
        assert (pages >= 0).all() and (pages < self.num_pages).all(), "row reads an unset page"
        return self._slots(pages).reshape(-1)[:length]

    def _run(self, plan: StepPlan) -> StepResult:
        self._check(plan)
        self.table[plan.page_rows, plan.page_index] = plan.page_ids
        for row in plan.new_rows:
            self.sampling[row.row] = row
        folds, at, used = [], 0, 0
        for i, row in enumerate(plan.rows.tolist()):
            n, end = int(plan.query_len[i]), int(plan.kv_len[i])
            if i < plan.num_decode:
                ids = self.next_token[row : row + 1]
            else:
                ids = plan.input_ids[used : used + n]
                used += n
            assert ids.min() >= 0 and ids.max() < self.vocab_size, "token outside the vocabulary"
            slots = self.row_slots(row, end)
            start = end - n
            base = self.kv[slots[start - 1]] if start else np.uint64(0)
            running = np.cumsum(token_hashes(ids, start), dtype=np.uint64)
            self.kv[slots[start:]] = base + running
            folds.append(slots)
            at += n
        return self._results(plan, folds)

    def _results(self, plan: StepPlan, slots: list[np.ndarray]) -> StepResult:
        entries = np.flatnonzero(plan.num_samples).tolist()
        count = len(entries)
        rows = plan.rows.tolist()
        settings = [self.sampling[rows[i]] for i in entries]
        top_n = max((s.top_logprobs for s in settings), default=0)
        ids = np.zeros(count, np.int32)
        logprobs = np.full(count, np.nan, np.float32)
        top_ids = np.zeros((count, top_n), np.int32)
        top_logprobs = np.zeros((count, top_n), np.float32)
        for slot, (i, setting) in enumerate(zip(entries, settings, strict=True)):
            row, position = rows[i], int(plan.kv_len[i])
            folded = fold(self.kv[slots[i]])
            if self.nan_rows(plan.step_id, row):
                ids[slot] = -1
                self.next_token[row] = 0
                continue
            token = sample(folded, position, self.vocab_size, setting)
            ids[slot] = self.next_token[row] = token
            if setting.return_logprob:
                logprobs[slot] = fake_logprob(folded, token)
                top_ids[slot], top_logprobs[slot] = fake_top(folded, top_n, self.vocab_size)
        prompt = [
            prompt_scores(self.kv[slots[s.index]], plan, s, self.vocab_size)
            for s in plan.logprob_spans
        ]
        return StepResult(
            step_id=plan.step_id,
            ids=ids,
            counts=np.ones(count, np.int32),
            logprobs=logprobs,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt,
        )

    def _check(self, plan: StepPlan) -> None:
        rows, tokens = plan.rows.tolist(), int(plan.query_len.sum())
        assert rows and len(set(rows)) == len(rows), "a row twice in a step"
        assert all(0 <= r < self.max_rows for r in rows)
        assert (plan.query_len >= 1).all() and (plan.kv_len >= plan.query_len).all()
        assert plan.kv_len.max() <= self.table.shape[1] * self.page_size
        assert (plan.query_len[: plan.num_decode] == 1).all()
        assert len(plan.input_ids) == tokens - plan.num_decode
        deltas = list(zip(plan.page_rows.tolist(), plan.page_index.tolist(), strict=True))
        assert len(set(deltas)) == len(deltas), "a page-table entry twice in a step"
        assert len(plan.num_samples) == len(rows) and plan.num_samples.max() <= self.max_samples
        assert (plan.num_samples[: plan.num_decode] == 1).all(), "a decode row that samples nothing"


def sample(folded: int, position: int, vocab: int, setting: RowSampling) -> int:
    seed = 0 if setting.params.temperature == 0 else setting.seed & MASK
    masked = frozenset(setting.stop_ids) if position < setting.min_end else frozenset()
    return pick(folded, position, vocab, seed, masked)


def prompt_scores(
    kv: np.ndarray, plan: StepPlan, span: object, vocab: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    start = int(plan.kv_len[span.index]) - int(plan.query_len[span.index]) + span.first
    targets = unpack_ids(span.targets)
    folds = [fold(kv[: start + j + 1]) for j in range(len(targets))]
    values = np.array(
        [fake_logprob(f, int(t)) for f, t in zip(folds, targets, strict=True)], np.float32
    )
    tops = [fake_top(f, span.top_n, vocab) for f in folds]
    return values, np.array([t[0] for t in tops]), np.array([t[1] for t in tops])


@dataclass
class Expected:
    ids: list[int]
    finish: str
    matched: int | None


def oracle(
    message: Generate, choice: int = 0, *, vocab: int = 97, eos: frozenset[int] = frozenset(),
    limit: int = 256,
) -> Expected:  # fmt: skip
    """What choice `choice` must give, from the prompt alone. `limit`: tokens in all."""
    params: SamplingParams = message.sampling
    prompt = unpack_ids(message.input_ids).tolist()
    seed = 0
    if params.temperature != 0:
        assert params.seed is not None, "only a seeded request can be foretold"
        seed = splitmix64(params.seed + choice)
    stop = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    new = limit - len(prompt) if params.max_new_tokens is None else params.max_new_tokens
    hashes = kv_of(np.array(prompt))
    output: list[int] = []
    while len(output) < new:
        position = len(prompt) + len(output)
        masked = stop if len(output) < params.min_new_tokens else frozenset()
        token = pick(fold(hashes), position, vocab, seed, masked)
        output.append(token)
        if token in stop and len(output) > params.min_new_tokens:
            return Expected(output, "stop", token)
        added = hashes[-1] + token_hashes(np.array([token]), position)
        hashes = np.concatenate([hashes, added])
    return Expected(output, "length", None)


def check_content(engine: FakeEngine, cache: object) -> None:
    """I13: the KV in every page of the tree is that of its tokens."""
    stack = [(node, np.zeros(0, np.int32)) for node in cache.root.children.values()]
    while stack:
        node, before = stack.pop()
        ids = np.concatenate([before, node.key])
        slots = engine._slots(node.pages.astype(np.int64)).reshape(-1)
        assert np.array_equal(engine.kv[slots], kv_of(ids)[len(before) :]), "I13: wrong KV in tree"
        stack += [(child, ids) for child in node.children.values()]
