"""Steps in which a decode entry has several tokens: the tokens, on the CPU the bits, of single
steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radix_runtime.attention.torch_native import TorchNativeAttention
from radix_runtime.config import ServerArgs
from radix_runtime.device import Device
from radix_runtime.distributed import Communicator
from radix_runtime.engine.model_runner import ModelRunner
from radix_runtime.model_config import ModelConfig
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.step_plan import (
    RowSampling,
    StepPlan,
    StepResult,
    decode_plan,
    prefill_plan,
)
from tests.marks import needs_cpu_library
from tests.runtime.tiny_models import reference_model, save

MAX_SAMPLES = 8
MODELS = ["llama", "mistral_window", "qwen2_bias", "qwen3_tied_odd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = save(reference_model(name), tmp_path_factory.mktemp(name))
        return made[name]

    return make


class Rank:
    """A ModelRunner with rows of prompts in it. Every step's hidden states are kept, as it samples
    from them: the bits of the logits are theirs."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        options = {"dtype": "float32", "max_total_tokens": 1600, "max_running_requests": 4}
        args = ServerArgs(model_path=str(folder), **{**options, **settings})
        config = ModelConfig.from_dir(folder)
        self.runner = ModelRunner(
            args,
            config,
            device=Device.resolve("cpu"),
            communicator=Communicator(),
            max_samples=MAX_SAMPLES,
        )
        self.page_size = args.page_size
        self.lengths: dict[int, int] = {}
        self.pages: dict[int, int] = {}
        pages = range(self.runner.kv_pool.num_pages)
        self._free = random.Random(1).sample(pages, len(pages))
        self.logits: list[torch.Tensor] = []
        for cache in self.runner.kv_pool.tensors():
            cache.fill_(float("nan"))  # the dummy page too: what was never stored is never read

    @property
    def state(self) -> Any:
        return self.runner._state

    def run(self, plan: StepPlan) -> StepResult:
        """Runs `plan` with the pages it needs; logits of its samples are appended to `logits`."""
        deltas = []
        for row, kv_len in zip(plan.rows.tolist(), plan.kv_len.tolist(), strict=True):
            while self.pages.setdefault(row, 0) * self.page_size < kv_len:
                deltas.append((row, self.pages[row], self._free.pop()))
                self.pages[row] += 1
        columns = np.array(deltas, np.int32).reshape(-1, 3).T
        plan.page_rows = columns[0]
        plan.page_index = columns[1]
        plan.page_ids = columns[2]
        forwarded = self.runner.forward(plan)
        with torch.inference_mode():
            logits = self.runner.model.compute_logits(forwarded.hidden)
        assert logits is not None
        self.logits.append(logits.clone())
        return self.runner.draw(plan, forwarded)

    def prefill(self, prompts: dict[int, list[int]], params: SamplingParams) -> StepResult:
        rows = list(prompts)
        for row in rows:
            self.lengths[row] = len(prompts[row])
        admitted = [RowSampling(row=row, seed=row, params=params) for row in rows]
        return self.run(prefill_plan(rows, list(prompts.values()), new_rows=admitted))

    def step(self, counts: dict[int, int], drafts: dict[int, list[int]]) -> StepResult:
        """A decode step of `counts[row]` tokens; `drafts` are what stands behind the first."""
        rows = list(counts)
        plan = decode_plan(rows, [self.lengths[row] + counts[row] for row in rows])
        plan.query_len[:] = list(counts.values())
        plan.num_samples[:] = list(counts.values())
        for row, ids in drafts.items():
            self.state.next_token[row, 1 : 1 + len(ids)] = torch.tensor(ids, dtype=torch.int32)
        result = self.run(plan)
        for row, count in zip(rows, result.counts.tolist(), strict=True):
            self.lengths[row] += count
        committed = self.state.committed_len
        assert {row: int(committed[row]) for row in rows} == {r: self.lengths[r] for r in rows}
        return result


PROMPTS = {2: [5, 6, 7, 8, 9], 0: list(range(10, 30)), 5: [11] * 16}


def single_steps(rank: Rank, params: SamplingParams, steps: int) -> dict[int, list[int]]:
    """Tokens of each row, the first from its prompt."""
    first = rank.prefill(PROMPTS, params).ids.tolist()
    tokens = {row: [token] for row, token in zip(PROMPTS, first, strict=True)}
    for _ in range(steps):
        ids = rank.step(dict.fromkeys(PROMPTS, 1), {}).ids.tolist()
        for row, token in zip(PROMPTS, ids, strict=True):
            tokens[row].append(token)
    return tokens


def split(result: StepResult, counts: dict[int, int]) -> dict[int, list[int]]:
    """The samples of each row."""
    parts = np.split(result.ids, np.cumsum(list(counts.values()))[:-1])
    return {row: part.tolist() for row, part in zip(counts, parts, strict=True)}


def check_right_drafts(folder: Path, params: SamplingParams, bits: bool, **settings: Any) -> None:
    """Eight, three and one token of three rows in a step, every draft right."""
    one = Rank(folder, **settings)
    tokens = single_steps(one, params, 12)
    many = Rank(folder, **settings)
    many.prefill(PROMPTS, params)
    counts = {2: 8, 0: 3, 5: 1}
    drafts = {row: tokens[row][1 : counts[row]] for row in counts}
    result = many.step(counts, drafts)
    assert result.counts.tolist() == [8, 3, 1]
    assert split(result, counts) == {row: tokens[row][1 : n + 1] for row, n in counts.items()}
    if bits:
        order = [(row, j) for row, n in counts.items() for j in range(n)]
        rows = list(PROMPTS)
        expected = [one.logits[1 + j][rows.index(row)] for row, j in order]
        assert torch.equal(many.logits[1], torch.stack(expected))
    ids = many.step(dict.fromkeys(PROMPTS, 1), {}).ids.tolist()
    assert ids == [tokens[row][counts[row] + 1] for row in PROMPTS]
    if bits:
        after = [one.logits[1 + counts[row]][i] for i, row in enumerate(PROMPTS)]
        assert torch.equal(many.logits[2], torch.stack(after))


@needs_cpu_library
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_as_entries_of_one_token_the_bits_of_single_steps(
    folder: Callable[[str], Path], name: str, dtype: str, page_size: int
) -> None:
    params = SamplingParams(temperature=0)
    check_right_drafts(folder(name), params, bits=True, dtype=dtype, page_size=page_size)


@needs_cpu_library
def test_draws_are_keyed_by_position(folder: Callable[[str], Path]) -> None:
    """Sampled tokens too: seeds by row, positions growing."""
    params = SamplingParams(temperature=1.0, top_p=0.95, min_new_tokens=3)
    check_right_drafts(folder("llama"), params, bits=True)


@pytest.mark.parametrize("name", MODELS)
def test_taken_whole_the_tokens_of_single_steps(
    folder: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchNativeAttention, "expands_decode", False)
    params = SamplingParams(temperature=0)
    seen: list[int] = []
    plain = TorchNativeAttention.plan

    def plan(self: TorchNativeAttention, batch: Any) -> None:
        seen.append(batch.max_query_len if batch.num_decode else 0)
        plain(self, batch)

    monkeypatch.setattr(TorchNativeAttention, "plan", plan)
    check_right_drafts(folder(name), params, bits=False, attention_backend="torch_native")
    assert max(seen) == MAX_SAMPLES, "no entry was taken whole"


@needs_cpu_library
@pytest.mark.parametrize("page_size", [1, 16])
def test_random_drafts_change_no_token(folder: Callable[[str], Path], page_size: int) -> None:
    """Of drafts that are right with three chances in four only the right beginning is accepted, and
    what a rejected one has stored is never seen again."""
    rng = random.Random(page_size)
    params = SamplingParams(temperature=0)
    steps = 40
    one = Rank(folder("llama"), page_size=page_size)
    tokens = single_steps(one, params, steps + MAX_SAMPLES)
    logits = {row: [step[i] for step in one.logits] for i, row in enumerate(PROMPTS)}
    many = Rank(folder("llama"), page_size=page_size)
    many.prefill(PROMPTS, params)
    done = dict.fromkeys(PROMPTS, 0)  # tokens after the prompt's
    accepted = []
    while min(done.values()) < steps:
        rows = [row for row in PROMPTS if done[row] < steps and rng.random() < 0.8]
        if not rows:
            continue
        counts = {row: rng.randint(1, MAX_SAMPLES) for row in rows}
        drafts = {row: tokens[row][done[row] + 1 : done[row] + counts[row]] for row in rows}
        wrong = {row: [x if rng.random() < 0.75 else 159 - x for x in drafts[row]] for row in rows}
        result = many.step(counts, wrong)
        samples = split(result, counts)
        at = 0
        for row, count in zip(rows, result.counts.tolist(), strict=True):
            right = [x == y for x, y in zip(wrong[row], drafts[row], strict=True)]
            assert count == 1 + (right.index(False) if False in right else len(right))
            begin = done[row] + 1
            assert samples[row][:count] == tokens[row][begin : begin + count]
            expected = torch.stack(logits[row][begin : begin + count])
            assert torch.equal(many.logits[-1][at : at + count], expected)
            accepted.append(count)
            done[row] += count
            at += counts[row]
    assert {1, 2, 3} < set(accepted)


def test_a_failed_draw_ends_what_is_accepted(folder: Callable[[str], Path]) -> None:
    """Logits that are not finite give -1, which no draft equals; it is read as id 0."""
    rank = Rank(folder("llama"))
    params = SamplingParams(temperature=0)
    tokens = single_steps(Rank(folder("llama")), params, 6)
    rank.prefill(PROMPTS, params)
    plan = decode_plan([2], [len(PROMPTS[2]) + 4], query_len=4)
    rank.state.next_token[2, 1:4] = torch.tensor(tokens[2][1:4], dtype=torch.int32)
    forwarded = rank.runner.forward(plan)
    forwarded.hidden = forwarded.hidden.clone()
    forwarded.hidden[2] = float("nan")
    result = rank.runner.draw(plan, forwarded)
    assert result.ids.tolist() == [*tokens[2][1:3], -1, tokens[2][4]]
    assert result.counts.tolist() == [3]
    assert rank.state.next_token[2, 0] == -1
    assert rank.state.committed_len[2] == len(PROMPTS[2]) + 3
    rank.runner.forward(decode_plan([2], [len(PROMPTS[2]) + 4]))
    assert rank.runner.batch.input_ids.tolist() == [0]


def test_chunks_and_drafts_in_one_step(folder: Callable[[str], Path]) -> None:
    """Samples of decode entries first, then of the chunk that ends its prompt; the other chunk has
    none."""
    params = SamplingParams(temperature=0)
    tokens = single_steps(Rank(folder("llama")), params, 6)
    rank = Rank(folder("llama"))
    rank.prefill({2: PROMPTS[2]}, params)
    rank.state.next_token[2, 1:3] = torch.tensor([tokens[2][1], 159 - tokens[2][2]])
    new = [RowSampling(row=row, seed=0, params=params) for row in (0, 5)]
    plan = StepPlan(
        step_id=0,
        num_decode=1,
        rows=np.array([2, 5, 0], np.int32),
        query_len=np.array([3, 9, 20], np.int32),
        kv_len=np.array([8, 9, 20], np.int32),
        num_samples=np.array([3, 0, 1], np.int32),
        input_ids=np.array(PROMPTS[5][:9] + PROMPTS[0], np.int32),
        new_rows=new,
    )
    result = rank.run(plan)
    assert result.counts.tolist() == [2, 1]
    assert result.ids[:2].tolist() == tokens[2][1:3] and result.ids[3] == tokens[0][0]
    assert rank.state.committed_len[[2, 5, 0]].tolist() == [7, 9, 20]
    assert rank.state.next_token[[2, 0], 0].tolist() == [tokens[2][2], tokens[0][0]]


def test_penalties_take_one_sample_a_step(folder: Callable[[str], Path]) -> None:
    rank = Rank(folder("llama"))
    rank.prefill(PROMPTS, SamplingParams(temperature=0, presence_penalty=1.0))
    with pytest.raises(ValueError, match="one sample a step"):
        rank.step({2: 2, 0: 1}, {})
