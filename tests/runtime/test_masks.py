"""A step with masks: the model runs at once, the draw when they are there; they fail alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest
import torch

from radix_runtime.engine.deferred_stream import DeferredStream
from radix_runtime.errors import EngineDeadError, MaskError
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.step_plan import Forward, RowSampling, StepPlan, decode_plan, prefill_plan
from tests.runtime.parity import case, engine

torch.set_num_threads(1)
VOCAB = 160
WORDS = -(-VOCAB // 32)
LIMIT = 60.0  # seconds


@pytest.fixture(scope="module", params=[1, 2])
def executor(request: pytest.FixtureRequest) -> Any:
    with engine(case("qwen2_bias").folder, tp_size=request.param, num_threads=2) as e:
        yield e.executor


def prompts(temperature: float = 0) -> StepPlan:
    """Rows 4 and 1, each in a page of its own."""
    params = SamplingParams(temperature=temperature, logit_bias={7: 0.5})
    plan = prefill_plan(
        [4, 1],
        [[3, 4, 5, 6, 7], [8, 9, 10]],
        new_rows=[RowSampling(row=row, seed=row, params=params) for row in (4, 1)],
    )
    plan.page_rows = np.array([4, 1], np.int32)
    plan.page_index = np.zeros(2, np.int32)
    plan.page_ids = np.array([0, 1], np.int32)
    return plan


def allow(*rows: set[int]) -> np.ndarray:
    """Masks that allow a row the ids of its set alone."""
    masks = np.zeros((len(rows), WORDS), np.uint32)
    for row, ids in enumerate(rows):
        for token in ids:
            masks[row, token // 32] |= np.uint32(1 << token % 32)
    return masks


class Masks:
    """StepMasks that come when `words` is done. `late` are the samples that do without."""

    def __init__(self, late: Sequence[int] = ()) -> None:
        self.words: Future[np.ndarray] = Future()
        self.late = list(late)

    def take(self, forward: Forward) -> tuple[np.ndarray, np.ndarray]:
        assert not forward.is_running()
        words = self.words.result(LIMIT)
        late = np.zeros(len(words), bool)
        late[self.late] = True
        return words, late


def done(masks: np.ndarray, late: Sequence[int] = ()) -> Masks:
    made = Masks(late)
    made.words.set_result(masks)
    return made


def ids(future: Future[Any]) -> list[int]:
    return future.result(timeout=LIMIT).ids.tolist()


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_mask_decides_what_can_come(executor: Any, temperature: float) -> None:
    first, second = ids(executor.launch(prompts(temperature)))
    everything = set(range(VOCAB))
    same = executor.launch(prompts(temperature), done(allow(everything, everything)))
    assert ids(same) == [first, second]
    without = executor.launch(prompts(temperature), done(allow(everything - {first}, everything)))
    other, unchanged = ids(without)
    assert other != first and unchanged == second
    only = executor.launch(prompts(temperature), done(allow({31}, {VOCAB - 1})))
    assert ids(only) == [31, VOCAB - 1]
    following = executor.launch(decode_plan([4, 1], [6, 4]), done(allow({0}, {32})))
    assert ids(following) == [0, 32]


def test_the_draw_waits_and_the_model_does_not(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = executor.runner
    order: list[str] = []
    forwarded = threading.Event()
    forward, draw = runner.forward, runner.draw

    def watched_forward(plan: StepPlan) -> Any:
        result = forward(plan)
        order.append(f"forward {plan.step_id}")
        forwarded.set()
        return result

    def watched_draw(plan: StepPlan, *rest: Any) -> Any:
        order.append(f"draw {plan.step_id}")
        return draw(plan, *rest)

    monkeypatch.setattr(runner, "forward", watched_forward)
    monkeypatch.setattr(runner, "draw", watched_draw)
    masks = Masks()
    plan = prompts()
    plan.step_id = 10
    step = executor.launch(plan, masks)
    behind = executor.launch(decode_plan([4, 1], [6, 4], step_id=11))
    assert forwarded.wait(LIMIT)
    assert order == ["forward 10"] and not step.done() and not behind.done()
    masks.words.set_result(allow({5}, {6}))
    assert ids(step) == [5, 6]
    assert len(ids(behind)) == 2 and step.done() and behind.done()
    assert order == ["forward 10", "draw 10", "forward 11", "draw 11"]
    expected = executor.launch(prompts(), done(allow({5}, {6})))
    again = executor.launch(decode_plan([4, 1], [6, 4]))
    assert ids(expected) == [5, 6] and ids(again) == ids(behind)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (ZeroDivisionError("no grammar"), "no grammar"),
        (allow({1}), "uint32 [1, 5], the step needs uint32 [2, 5]"),
        (allow({1}, {1}).astype(np.int64), "int64 [2, 5], the step needs uint32"),
    ],
)
def test_masks_that_fail_end_their_step_alone(executor: Any, masks: Any, message: str) -> None:
    expected = ids(executor.launch(prompts()))
    future = Masks()
    plan = prompts()
    plan.step_id = 7
    step = executor.launch(plan, future)
    behind = executor.launch(decode_plan([4, 1], [6, 4]))
    if isinstance(masks, Exception):
        future.words.set_exception(masks)
    else:
        future.words.set_result(masks)
    with pytest.raises(MaskError) as caught:
        step.result(timeout=LIMIT)
    assert caught.value.step_id == 7 and message in str(caught.value)
    assert executor.failure is None
    assert all(0 <= token < VOCAB for token in ids(behind))
    assert ids(executor.launch(prompts())) == expected


def test_a_step_that_fails_behind_a_mask_is_the_engines_death() -> None:
    e = engine(case("qwen2_bias").folder)
    executor: Any = e.executor
    with e:
        masks = Masks()
        step = executor.launch(prompts(), masks)
        too_long = executor.launch(decode_plan([4], [10**6]))
        behind = executor.launch(decode_plan([4], [7]))
        masks.words.set_result(allow({5}, {6}))
        assert ids(step) == [5, 6]
        for failed in (too_long, behind):
            with pytest.raises(EngineDeadError, match="tokens of context"):
                failed.result(timeout=LIMIT)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_late_row_draws_in_the_next_step(executor: Any, temperature: float) -> None:
    """Launched ahead or not, the step behind computes its last token again and draws what the
    first would have drawn; the neighbour goes on. All ranks agree, as the next steps show."""
    everything = set(range(VOCAB))
    free = allow(everything, everything)
    executor.launch(prompts(temperature), done(allow({5}, {6}))).result(LIMIT)
    steps = [
        executor.launch(decode_plan([4, 1], [6 + i, 4 + i]), done(free)).result(LIMIT).ids.tolist()
        for i in range(4)
    ]
    rows = list(zip(*steps, strict=True))
    executor.launch(prompts(temperature), done(allow({5}, {6}))).result(LIMIT)
    pattern = [[0], [0], [], [1], [0, 1], [], [1], []]
    launched = [
        executor.launch(decode_plan([4, 1], [6 + i, 4 + i]), done(free, late))
        for i, late in enumerate(pattern)
    ]
    found: list[list[int]] = [[], []]
    for step, late in zip(launched, pattern, strict=True):
        result = step.result(LIMIT)
        assert np.flatnonzero(result.late).tolist() == late
        assert (result.ids[late] == -1).all()
        for row in {0, 1} - set(late):
            found[row].append(int(result.ids[row]))
    assert tuple(found[0][:4]) == rows[0] and tuple(found[1][:4]) == rows[1]


def test_penalties_count_only_what_was_drawn(executor: Any) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.7, frequency_penalty=0.4)

    def run(pattern: list[list[int]]) -> list[int]:
        plan = prompts()
        plan.new_rows = [RowSampling(row=row, seed=row, params=params) for row in (4, 1)]
        executor.launch(plan).result(LIMIT)
        free = np.full((2, WORDS), 0xFFFFFFFF, np.uint32)
        ids = []
        for i, late in enumerate(pattern):
            step = executor.launch(decode_plan([4, 1], [6 + i, 4 + i]), done(free, late))
            if not late:
                ids.append(int(step.result(LIMIT).ids[0]))
        return ids

    assert run([[0], [], [0], [0], [], []]) == run([[], [], []])


@pytest.mark.parametrize("late", [[1], [0, 1]])
def test_a_prompt_cannot_be_late(executor: Any, late: list[int]) -> None:
    everything = set(range(VOCAB))
    step = executor.launch(prompts(), done(allow(everything, everything), late))
    with pytest.raises(MaskError, match="late that must not be"):
        step.result(timeout=LIMIT)


class CallersThread(Executor):
    """As a GPU's stream: work runs on the thread of `submit`, and raises there."""

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*args, **options))
        return future


def test_a_deferred_stream_keeps_the_order_and_the_caller_free() -> None:
    stream = DeferredStream(CallersThread())
    order: list[tuple[str, bool]] = []
    caller = threading.current_thread()

    def work(name: str, gate: threading.Event | None = None) -> str:
        if gate is not None:
            assert gate.wait(LIMIT)
        order.append((name, threading.current_thread() is caller))
        return name

    assert stream.submit(work, "a").result() == "a"
    gate = threading.Event()
    waiting = stream.submit(work, "b", gate, waits=True)
    behind = stream.submit(work, "c")
    fails = stream.submit(lambda: 1 // 0)
    assert not waiting.done() and not behind.done()
    gate.set()
    assert (waiting.result(), behind.result()) == ("b", "c")
    with pytest.raises(ZeroDivisionError):
        fails.result()
    assert waiting.done() and behind.done() and fails.done()
    assert stream.submit(work, "d").result() == "d"
    with pytest.raises(ZeroDivisionError):
        stream.submit(lambda: 1 // 0)
    stream.shutdown()
    assert order == [("a", True), ("b", False), ("c", False), ("d", True)]
