"""What a step has handed out is its own: no later step writes it, and no step reads it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from radix_runtime.device import Device
from radix_runtime.engine.inference import inference
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.step_plan import RowSampling, StepPlan, StepResult, decode_plan, prefill_plan
from tests.runtime.parity import case, engine

LIMIT = 60
ROWS = [4, 1]
PROMPTS = [[3, 4, 5, 6, 7], [8, 9, 10]]
PAGES_OF_ROW = 3
STEPS = 30  # over two borders of pages of 16 tokens


@pytest.fixture(scope="module")
def executor() -> Iterator[Any]:
    with engine(case("qwen2_bias").folder, num_threads=2) as e:
        yield e.executor


def plans(temperature: float) -> list[StepPlan]:
    """The prompts, then decode steps, which ask for pages when they need them. One of the rows asks
    for log-probabilities if it is not greedy."""
    params = SamplingParams(temperature=temperature)
    asks = temperature > 0
    admitted = [
        RowSampling(row=ROWS[0], seed=4, params=params, return_logprob=asks, top_logprobs=2 * asks),
        RowSampling(row=ROWS[1], seed=1, params=params),
    ]
    steps = [prefill_plan(ROWS, PROMPTS, new_rows=admitted)]
    lengths = [len(prompt) for prompt in PROMPTS]
    for step in range(1, STEPS):
        steps.append(decode_plan(ROWS, [length + step for length in lengths]))
    known = [0, 0]
    for plan in steps:
        deltas = []
        for entry, row in enumerate(ROWS):
            while known[entry] * 16 < plan.kv_len[entry]:
                deltas.append((row, known[entry], PAGES_OF_ROW * entry + known[entry]))
                known[entry] += 1
        columns = np.array(deltas, np.int32).reshape(-1, 3).T
        plan.page_rows = columns[0]
        plan.page_index = columns[1]
        plan.page_ids = columns[2]
    return steps


def arrays(result: StepResult) -> list[np.ndarray]:
    """What a result holds of its own."""
    found = [result.ids, result.logprobs, result.top_ids, result.top_logprobs]
    return [array for array in found if array is not None]


def values(result: StepResult) -> list[str]:
    """All of it, to compare; NaN equals NaN."""
    return [repr(array.tolist()) for array in arrays(result)]


def launched(executor: Any, temperature: float, *, scribbles: bool) -> list[list[str]]:
    """The results of all steps, which were launched before the first had ended. `scribbles`: the
    host writes over each as soon as it has it, while the next step runs."""
    told: list[list[str]] = []

    def look(step: Future[StepResult]) -> None:
        result = step.result()
        told.append(values(result))
        if scribbles:
            for array in arrays(result):
                array.fill(0)

    futures: list[Future[StepResult]] = []
    for plan in plans(temperature):
        futures.append(executor.launch(plan))
        futures[-1].add_done_callback(look)
    results = [future.result(timeout=LIMIT) for future in futures]
    if not scribbles:
        assert [values(result) for result in results] == told
    return told


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_later_steps_and_results_do_not_meet(executor: Any, temperature: float) -> None:
    told = launched(executor, temperature, scribbles=False)
    assert len(told) == STEPS and len({tuple(step) for step in told}) > 1
    assert {len(step) for step in told} == {4 if temperature else 1}
    assert launched(executor, temperature, scribbles=True) == told


def test_what_the_host_has_is_a_copy() -> None:
    device = Device.resolve("cpu")
    source = torch.arange(6, dtype=torch.int32)[::2]
    copied = device.to_host(source)
    source.fill_(7)
    assert copied.tolist() == [0, 2, 4] and copied.dtype == np.int32
    copied.fill(8)
    assert source.tolist() == [7, 7, 7]


def test_counts_that_results_share_cannot_be_written(executor: Any) -> None:
    futures = [executor.launch(plan) for plan in plans(0)]
    results = [future.result(timeout=LIMIT) for future in futures]
    for result in results:
        assert result.counts.tolist() == [1, 1]
        with pytest.raises(ValueError, match="read-only"):
            result.counts[0] = 2


def test_inference_mode_is_entered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    enter = torch.inference_mode.__enter__

    def counted(mode: Any) -> None:
        entered.append(mode)
        enter(mode)

    monkeypatch.setattr(torch.inference_mode, "__enter__", counted)

    @inference
    def inner(*, fails: bool) -> torch.Tensor:
        """Documented."""
        assert torch.is_inference_mode_enabled()
        if fails:
            raise KeyError
        return torch.ones(1)

    @inference
    def outer(*, fails: bool) -> torch.Tensor:
        inner(fails=False)
        return inner(fails=fails)

    assert outer(fails=False).is_inference() and len(entered) == 1
    with pytest.raises(KeyError):
        outer(fails=True)
    assert not torch.is_inference_mode_enabled()
    assert inner(fails=False).is_inference() and len(entered) == 3
    assert inner.__doc__ == "Documented."
