"""An Executor without a model: a wrong or stale page becomes a wrong token.

Every entry of the cache is a hash (`fake_model.py`), read *through the page table*: the engine's
own mirror, which knows only what StepPlans told it. Plans are encoded at launch and decoded when
the step runs, so nothing the scheduler changes afterwards can reach a step in flight.

What the model keeps beside the KV of every token (`FakeModel`) lies in memory of its own: pages of
a window group, states of rows and their snapshots; copies between device and host are made when the
step runs.

With `max_samples` above 1 the engine drafts: each draft is the right token with probability `luck`,
so that a decode entry accepts 1 .. max_samples tokens. A rejected draft leaves wrong KV behind
the committed length of its row, which no later step may read.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from radix_runtime.cache_spec import FullPagesSpec, GroupSpec, RowSnapshotsSpec, WindowPagesSpec
from radix_runtime.messages import unpack_ids
from radix_runtime.step_plan import (
    EngineCommand,
    Forward,
    LogprobSpan,
    RowSampling,
    SpanScores,
    StepMasks,
    StepPlan,
    StepResult,
    deserialize_plan,
    serialize_plan,
)
from tests.runtime.fake_model import (
    START_STATE,
    FakeModel,
    allowed_token,
    fake_logprob,
    fake_top,
    fold,
    sample,
    token_hashes,
)

RAN = Forward(queued_at=0.0, is_running=lambda: False)


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
class Samples:
    """What one entry sampled: an id for each of its `num_samples`, and from which hash."""

    setting: RowSampling
    ids: list[int] = field(default_factory=list)
    folds: list[int] = field(default_factory=list)
    count: int = 1
    late: bool = False


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
    luck: float = 0.75
    model: FakeModel = field(default_factory=FakeModel)
    group_sizes: tuple[int, int] = (64, 64)  # pages of the window group, slots of snapshots
    host_pages: int = 0
    nan_rows: Callable[[int, int], bool] = lambda step, row: False
    steps: list[tuple[int, int, int]] = field(default_factory=list)  # decode rows, rows, tokens
    counts: list[tuple[int, int]] = field(default_factory=list)  # (accepted, sampled) of decodes
    results: dict[int, StepResult] = field(default_factory=dict)
    closed: bool = False
    commands: list[EngineCommand] = field(default_factory=list)
    command_error: Exception | None = None

    def __post_init__(self) -> None:
        slots = (self.num_pages + 1) * self.page_size
        self.kv = np.full(slots, 0xDEAD, np.uint64)
        longest = min(self.max_context, self.num_pages * self.page_size)
        self.table = np.full((self.max_rows, -(-longest // self.page_size)), -1, np.int64)
        # The device's state of a row: the token that comes next, how many are committed, and (for
        # the checks alone) what was written at the committed positions.
        self.next_token = np.full(self.max_rows, -(10**6), np.int64)
        self.committed_len = np.zeros(self.max_rows, np.int64)
        self.committed_kv = [np.zeros(0, np.uint64)] * self.max_rows
        self.sampling: dict[int, RowSampling] = {}
        self._make_groups()
        self.queue: list[tuple[int, bytes, StepMasks | None]] = []
        self.masks: np.ndarray | None = None  # of the step that runs
        self.late: np.ndarray | None = None
        self.num_sampled = 0  # by the step that runs
        self.garbage = np.random.default_rng(0)
        self.random = random.Random(0)
        self.last_step = -1

    def _make_groups(self) -> None:
        """Memory of the groups beside the full pages, and of the host."""
        groups: list[GroupSpec] = [FullPagesSpec()]
        window_pages, num_slots = self.group_sizes
        if self.model.window is not None:
            groups.append(WindowPagesSpec(num_pages=window_pages, window=self.model.window))
        if self.model.recurrent:
            groups.append(RowSnapshotsSpec(num_slots=num_slots))
        self.cache_groups = tuple(groups)
        self.window_kv = np.full(window_pages * self.page_size, 0xDEAD, np.uint64)
        self.window_table = np.full_like(self.table, -1)
        self.states = [0xDEAD] * self.max_rows
        self.snapshots = [0xDEAD] * num_slots
        self.host_kv = np.full((self.host_pages, self.page_size), 0xDEAD, np.uint64)
        self.num_copies = 0
        # With a host, freed pages lie untouched until the copies of the next plan are made.
        self.poisoned: dict[int, list[np.ndarray]] = {}

    def launch(self, plan: StepPlan, masks: StepMasks | None = None) -> Handle:
        assert plan.step_id == self.last_step + 1, "steps are numbered without a gap"
        self.last_step = plan.step_id
        self.steps.append((plan.num_decode, len(plan.rows), plan.num_tokens))
        self.queue.append((plan.step_id, serialize_plan(plan), masks))
        # The masks may need the result of the step before.
        if not self.lazy and all(masks is None for _, _, masks in self.queue):
            self.run_until(plan.step_id)
        return Handle(self, plan.step_id)

    def call(self, command: EngineCommand) -> Future[list[str]]:
        """Behind the steps launched so far, which it runs."""
        self.run_until(self.last_step)
        self.commands.append(command)
        future: Future[list[str]] = Future()
        if self.command_error is not None:
            future.set_exception(self.command_error)
        else:
            future.set_result(["done"])
        return future

    def close(self) -> None:
        self.closed = True

    def poison(self, pages: np.ndarray) -> None:
        """Fills pages that nobody may read any more with garbage."""
        slots = self._slots(np.asarray(pages, np.int64)).reshape(-1)
        self.kv[slots] = self.garbage.integers(0, 2**63, len(slots), dtype=np.uint64)

    def poison_later(self, pages: np.ndarray) -> None:
        """The same, after the copies of the next plan."""
        self.poisoned.setdefault(self.last_step + 1, []).append(pages.copy())

    def poison_window(self, pages: np.ndarray) -> None:
        """The same for pages of the window group."""
        slots = self._slots(np.asarray(pages, np.int64)).reshape(-1)
        self.window_kv[slots] = self.garbage.integers(0, 2**63, len(slots), dtype=np.uint64)

    def run_until(self, step_id: int) -> None:
        while self.queue and self.queue[0][0] <= step_id:
            _, frame, masks = self.queue.pop(0)
            plan = deserialize_plan(frame)
            self.num_sampled = 0
            self.masks, self.late = (None, None) if masks is None else masks.take(RAN)
            self.results[plan.step_id] = self._run(plan)

    def _slots(self, pages: np.ndarray) -> np.ndarray:
        return pages[..., None] * self.page_size + np.arange(self.page_size)

    def row_slots(self, row: int, length: int) -> np.ndarray:
        pages = self.table[row, : -(-length // self.page_size)]
        assert (pages >= 0).all() and (pages < self.num_pages).all(), "row reads an unset page"
        return self._slots(pages).reshape(-1)[:length]

    # A step -------------------------------------------------------------------------------

    def _run(self, plan: StepPlan) -> StepResult:
        self._check(plan)
        self._copy_pages(plan)
        self.table[plan.page_rows, plan.page_index] = plan.page_ids
        for deltas in plan.window_pages:
            self.window_table[deltas.rows, deltas.index] = deltas.ids
        for row in plan.new_rows:
            self.sampling[row.row] = row
            self.committed_len[row.row] = -1  # what the first chunk starts from
            self.states[row.row] = START_STATE
        for copy in plan.restores:
            self.states[copy.row] = self.snapshots[copy.slot]
        self.wanted = {(copy.row, copy.position): copy.slot for copy in plan.snapshots}
        samples: list[Samples] = []
        used = 0
        for index, row in enumerate(plan.rows.tolist()):
            length = int(plan.query_len[index])
            if index < plan.num_decode:
                samples.append(self._decode(plan, index, row))
                continue
            ids = plan.input_ids[used : used + length]
            used += length
            self._prefill(row, ids, int(plan.kv_len[index]) - length)
            if plan.num_samples[index]:
                samples.append(self._sample_prompt(plan.step_id, row))
        return self._results(plan, samples)

    def _copy_pages(self, plan: StepPlan) -> None:
        device = self.kv.reshape(-1, self.page_size)
        loaded: set[int] = set()
        copies = [plan.copy_source, plan.copy_target, plan.copy_to_host]
        for source, target, to_host in zip(*[c.tolist() for c in copies], strict=True):
            if to_host:
                self.host_kv[target] = device[source]
            else:
                device[target] = self.host_kv[source]
                loaded.add(target)
            self.num_copies += 1
        freed = self.poisoned.pop(plan.step_id, [])
        for pages in freed:
            self.poison(pages[~np.isin(pages, list(loaded))])

    def _prefill(self, row: int, ids: np.ndarray, start: int) -> None:
        if self.committed_len[row] < 0:  # on whatever prefix the cache holds
            self.committed_kv[row] = self.kv[self.row_slots(row, start)]
        else:
            assert self.committed_len[row] == start, "a chunk does not continue its prompt"
        self._write(row, ids, start)
        self._advance(row, ids, start)
        self.committed_len[row] = start + len(ids)

    def _write(self, row: int, ids: np.ndarray, start: int) -> None:
        """KV of `ids` from position `start` on, and what the checks know of it."""
        assert ids.min() >= 0 and ids.max() < self.vocab_size, "token outside the vocabulary"
        slots = self.row_slots(row, start + len(ids))
        before = self.kv[slots[:start]]
        intact = np.array_equal(before, self.committed_kv[row][:start])
        assert intact, "I13: KV read is not what was committed"
        base = before[-1] if start else np.uint64(0)
        written = base + np.cumsum(token_hashes(ids, start), dtype=np.uint64)
        self.kv[slots[start:]] = written
        if self.model.window is not None:
            self._write_window(row, ids, start)
        self.committed_kv[row] = np.concatenate([before, written])

    def _write_window(self, row: int, ids: np.ndarray, start: int) -> None:
        pages = self.window_table[
            row, start // self.page_size : -(-(start + len(ids)) // self.page_size)
        ]
        assert (pages >= 0).all(), "row writes an unset page of its window"
        slots = self._slots(pages).reshape(-1)[start % self.page_size :][: len(ids)]
        self.window_kv[slots] = token_hashes(ids, start)

    def _window(self, row: int, length: int) -> np.ndarray:
        """Entries of the row's window after `length` tokens."""
        if self.model.window is None:
            return self.window_kv[:0]
        first = max(0, length - self.model.window)
        pages = self.window_table[row, first // self.page_size : -(-length // self.page_size)]
        assert (pages >= 0).all(), "row reads an unset page of its window"
        slots = self._slots(pages).reshape(-1)[first % self.page_size :][: length - first]
        return self.window_kv[slots]

    def _advance(self, row: int, ids: np.ndarray, start: int) -> None:
        """The row's recurrent state sees committed tokens; snapshots are taken on the way."""
        if not self.model.recurrent:
            return
        for index in range(len(ids)):
            hashes = token_hashes(ids[index : index + 1], start + index)
            self.states[row] = self.model.advance(self.states[row], hashes)
            slot = self.wanted.get((row, start + index + 1))
            if slot is not None:
                self.snapshots[slot] = self.states[row]

    def _sample_prompt(self, step_id: int, row: int) -> Samples:
        samples = Samples(self.sampling[row])
        self._sample(step_id, row, samples)
        self.next_token[row] = max(samples.ids[-1], 0)
        return samples

    def _sample(self, step_id: int, row: int, samples: Samples) -> None:
        """The token after everything that is written for the row."""
        kv = self.committed_kv[row]
        folded = self.model.look(kv, self._window(row, len(kv)), self.states[row])
        token = sample(folded, len(kv), self.vocab_size, samples.setting)
        if self.masks is not None:
            token = allowed_token(self.masks[self.num_sampled], token, folded)
        self.num_sampled += 1
        samples.ids.append(-1 if self.nan_rows(step_id, row) else token)
        samples.folds.append(folded)

    def _decode(self, plan: StepPlan, index: int, row: int) -> Samples:
        """Runs the last accepted token and a draft after each sample, right or wrong."""
        samples = Samples(self.sampling[row])
        length = int(plan.query_len[index])
        assert length == 1 or not samples.setting.params.has_penalties
        start = int(self.committed_len[row])
        assert start + length <= plan.kv_len[index], "not the upper bound of the row's length"
        token = int(self.next_token[row])
        if self.late is not None and self.late[self.num_sampled]:
            return self._sit_out(row, token, samples)
        accepting = True
        state = self.states[row]  # after the accepted tokens
        for step in range(length):
            self._write(row, np.array([token]), start + step)
            if not accepting:
                self.wanted = {key: slot for key, slot in self.wanted.items() if key[0] != row}
            self._advance(row, np.array([token]), start + step)
            self._sample(plan.step_id, row, samples)
            sampled = max(samples.ids[-1], 0)
            if accepting:
                samples.count = step + 1
                self.next_token[row] = sampled
                state = self.states[row]
            token = sampled
            if self.random.random() > self.luck:
                token = (sampled + self.random.randrange(1, self.vocab_size)) % self.vocab_size
            accepting = accepting and token == sampled
        self.states[row] = state
        self.committed_len[row] = start + samples.count
        self.committed_kv[row] = self.committed_kv[row][: start + samples.count]
        self.counts.append((samples.count, length))
        return samples

    def _sit_out(self, row: int, token: int, samples: Samples) -> Samples:
        """Runs the last accepted token; the row stays where it was."""
        start = int(self.committed_len[row])
        self._write(row, np.array([token]), start)
        self.committed_kv[row] = self.committed_kv[row][:start]
        self.num_sampled += 1
        return Samples(samples.setting, [-1], folds=[0], late=True)

    def _results(self, plan: StepPlan, samples: list[Samples]) -> StepResult:
        top_n = max((s.setting.top_logprobs for s in samples), default=0)
        ids = [token for entry in samples for token in entry.ids]
        logprobs = np.full(len(ids), np.nan, np.float32)
        top_ids = np.zeros((len(ids), top_n), np.int32)
        top_logprobs = np.zeros((len(ids), top_n), np.float32)
        slot = 0
        for entry in samples:
            for token, folded in zip(entry.ids, entry.folds, strict=True):
                if entry.setting.return_logprob and token >= 0:
                    logprobs[slot] = fake_logprob(folded, token)
                    top_ids[slot], top_logprobs[slot] = fake_top(folded, top_n, self.vocab_size)
                slot += 1
        return StepResult(
            step_id=plan.step_id,
            ids=np.array(ids, np.int32),
            counts=np.array([entry.count for entry in samples], np.int32),
            logprobs=logprobs,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            late=None if self.late is None else np.array([entry.late for entry in samples]),
            prompt_logprobs=[self._prompt_scores(plan, span) for span in plan.logprob_spans],
        )

    def _prompt_scores(self, plan: StepPlan, span: LogprobSpan) -> SpanScores:
        kv = self.committed_kv[int(plan.rows[span.index])]
        start = int(plan.kv_len[span.index]) - int(plan.query_len[span.index]) + span.first
        targets = unpack_ids(span.targets).tolist()
        folds = [fold(kv[: start + j + 1]) for j in range(len(targets))]
        values = [fake_logprob(f, token) for f, token in zip(folds, targets, strict=True)]
        tops = [fake_top(f, span.top_n, self.vocab_size) for f in folds]
        return SpanScores(
            logprobs=np.array(values, np.float32),
            top_ids=np.array([ids for ids, _ in tops]),
            top_logprobs=np.array([scores for _, scores in tops]),
            ranks=np.array(targets) + 1 if span.ranks else None,  # nothing true, but the token's
        )

    def _check(self, plan: StepPlan) -> None:
        rows = plan.rows.tolist()
        decodes = slice(plan.num_decode)
        chunks = slice(plan.num_decode, None)
        assert rows and len(set(rows)) == len(rows), "a row twice in a step"
        assert all(0 <= r < self.max_rows for r in rows)
        assert (plan.query_len >= 1).all() and (plan.kv_len >= plan.query_len).all()
        assert plan.kv_len.max() <= self.table.shape[1] * self.page_size
        assert len(plan.input_ids) == plan.query_len[chunks].sum()
        assert np.array_equal(plan.num_samples[decodes], plan.query_len[decodes])
        assert (plan.query_len[decodes] <= self.max_samples).all()
        assert np.isin(plan.num_samples[chunks], (0, 1)).all()
        deltas = list(zip(plan.page_rows.tolist(), plan.page_index.tolist(), strict=True))
        assert len(set(deltas)) == len(deltas), "a page-table entry twice in a step"
