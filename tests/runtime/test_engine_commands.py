"""Commands to the engine: in order with the steps, on every rank, and harmless when they fail."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radix_runtime.errors import EngineCommandError, EngineDeadError
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.step_plan import (
    Profile,
    RowSampling,
    StepPlan,
    decode_plan,
    deserialize_plan,
    prefill_plan,
    serialize_plan,
)
from tests.runtime.parity import case, engine

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[1, 2])
def executor(request: pytest.FixtureRequest) -> Any:
    with engine(case("qwen2_bias").folder, tp_size=request.param, num_threads=2) as e:
        yield e.executor


def prompt(step_id: int, count: int = 5) -> StepPlan:
    plan = prefill_plan(
        [0],
        [list(range(3, 3 + count))],
        step_id=step_id,
        new_rows=[RowSampling(row=0, seed=0, params=SamplingParams(temperature=0))],
    )
    plan.page_rows = np.zeros(1, np.int32)
    plan.page_index = np.zeros(1, np.int32)
    plan.page_ids = np.zeros(1, np.int32)
    return plan


def trace_names(file: str) -> list[str]:
    events = json.loads(Path(file).read_text())["traceEvents"]
    return [event["name"] for event in events if "dur" in event]


def test_every_rank_writes_a_trace_of_the_steps_between(executor: Any, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    before = executor.launch(prompt(0, count=4))
    started = executor.call(Profile(action="start", directory=str(folder)))
    inside = [executor.launch(prompt(1, count=7)), executor.launch(decode_plan([0], [8]))]
    stopped = executor.call(Profile(action="stop"))
    behind = executor.launch(prompt(3, count=6))
    for step in (before, *inside, behind):
        assert step.result().ids.min() >= 0
    files = stopped.result()
    assert files == started.result()
    assert sorted(files) == sorted(str(file) for file in folder.iterdir())
    assert len(files) == 1 + len(getattr(executor, "workers", ()))
    for file in files:
        names = trace_names(file)
        forward = [name for name in names if name.startswith("forward")]
        assert forward == ["forward 7 tokens", "forward 1 tokens"]
        assert names.count("draw") == 2


def test_a_failing_command_leaves_the_engine_serving(executor: Any, tmp_path: Path) -> None:
    first = executor.launch(prompt(0)).result().ids.tolist()
    failed = executor.call(Profile(action="stop"))
    assert executor.launch(prompt(1)).result().ids.tolist() == first
    with pytest.raises(EngineCommandError, match="rank 0: RuntimeError: not profiling") as caught:
        failed.result()
    assert caught.value.rank == 0
    (tmp_path / "file").touch()
    with pytest.raises(EngineCommandError, match="FileExistsError|NotADirectoryError"):
        executor.call(Profile(action="start", directory=str(tmp_path / "file"))).result()
    executor.call(Profile(action="start", directory=str(tmp_path))).result()
    with pytest.raises(EngineCommandError, match="already profiling"):
        executor.call(Profile(action="start", directory=str(tmp_path))).result()
    executor.call(Profile(action="stop")).result()
    assert executor.launch(prompt(2)).result().ids.tolist() == first


def test_the_rank_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 starts, rank 1 cannot; the next command finds both in their own state."""
    with engine(case("qwen2_bias").folder, tp_size=2, num_threads=2) as e:
        executor: Any = e.executor
        profiler = executor.runner.profiler
        with monkeypatch.context() as patch:
            patch.setattr(profiler, "start", lambda directory: tmp_path)
            bad = tmp_path / "file"
            bad.touch()
            with pytest.raises(EngineCommandError, match="rank 1: ") as caught:
                executor.call(Profile(action="start", directory=str(bad))).result()
        assert caught.value.rank == 1
        files = executor.call(Profile(action="start", directory=str(tmp_path))).result()
        assert executor.call(Profile(action="stop")).result() == files


def test_a_worker_that_dies_ends_a_command() -> None:
    with engine(case("qwen2_bias").folder, tp_size=2, num_threads=2) as e:
        executor: Any = e.executor
        [worker] = executor.workers
        os.kill(worker.pid, signal.SIGSTOP)
        waiting = executor.call(Profile(action="stop"))
        assert not waiting.done()
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            waiting.result(timeout=30)
        with pytest.raises(EngineDeadError, match="rank 1"):
            executor.call(Profile(action="stop"))


class CallersThread(Executor):
    """As a GPU's stream: work runs in `submit`, and what it raises comes out there."""

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*args, **options))
        return future


def test_on_a_gpus_stream_the_error_is_the_futures_too(monkeypatch: pytest.MonkeyPatch) -> None:
    e = engine(case("qwen2_bias").folder)
    executor: Any = e.executor
    with e, monkeypatch.context() as patch:
        patch.setattr(executor._stream, "_stream", CallersThread())
        failed = executor.call(Profile(action="stop"))
        with pytest.raises(EngineCommandError, match="not profiling"):
            failed.result()


def test_a_command_crosses_the_ring_as_itself() -> None:
    command = Profile(action="start", directory="/somewhere")
    assert deserialize_plan(serialize_plan(command)) == command
    assert isinstance(deserialize_plan(serialize_plan(decode_plan([1], [2]))), StepPlan)
