"""Ranks that are processes on the CPU and work as those of GPUs do: they list candidates of their
parts of the vocabulary, by the reference, and pad and capture their steps."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import radix_kernels
from radix_runtime.engine import executor, model_runner
from radix_runtime.engine.model_runner import ModelRunner
from radix_runtime.engine.step_ring import StepRingReader
from radix_runtime.errors import ConfigError
from radix_runtime.step_plan import NO_STEP, StepPlan
from radix_runtime.step_shape import StepShape, StepShapes
from tests.runtime.fake_graphs import FakeRecorder, install

WAYS = "RADIX_TEST_RANKS"  # what worker processes find in their environment


def use(ways: list[str], set_attribute: Callable[[Any, str, Any], None]) -> None:
    """`ways`: of candidates, graphs, or one of FAULTS. For the engines of this process from now
    on."""

    def lists_candidates(runner: ModelRunner) -> bool:
        radix_kernels.set_fallback("reference")
        return runner.model.vocabulary_shard() is not None

    if "candidates" in ways:
        set_attribute(ModelRunner, "lists_candidates", lists_candidates)
    if "graphs" in ways:
        install(FakeRecorder(), set_attribute)


def _fail_to_load(error: Exception) -> Callable[[], None]:
    def load_model(*args: Any) -> None:
        raise error

    return lambda: setattr(model_runner, "load_model", load_model)


def _load_for_minutes(*args: object) -> None:
    time.sleep(300.0)


def _lose_a_frame() -> None:
    """The third."""
    receive = StepRingReader.receive
    received = 0

    def receive_others(ring: StepRingReader) -> bytes | None:
        nonlocal received
        received += 1
        if received == 3:
            receive(ring)
        return receive(ring)

    StepRingReader.receive = receive_others  # type: ignore[assignment, method-assign]


def _fail_to_capture() -> None:
    def record(recorder: FakeRecorder, work: object) -> None:
        raise ConfigError("rank 1 has no room for graphs")

    FakeRecorder.record = record  # type: ignore[method-assign, assignment]


def _think_of_another_shape() -> None:
    """Of steps of three entries, once it serves."""
    of = StepShapes.of

    def strange(shapes: StepShapes, plan: StepPlan) -> StepShape | None:
        is_strange = plan.step_id != NO_STEP and len(plan.rows) == 3
        return None if is_strange else of(shapes, plan)

    StepShapes.of = strange  # type: ignore[assignment, method-assign]


def _linger() -> None:
    """Where the interpreter ends."""
    atexit.register(time.sleep, 60.0)


def _hold_other_rows() -> None:
    shared_facts = executor.shared_facts

    def other_facts(runner: ModelRunner) -> dict[str, object]:
        return {**shared_facts(runner), "rows": 99}

    executor.shared_facts = other_facts  # type: ignore[attr-defined]


# What a worker does wrong, and rank 0 does not.
FAULTS: dict[str, Callable[[], None]] = {
    "config": _fail_to_load(ConfigError("model.safetensors: cannot be read here")),
    "runtime": _fail_to_load(RuntimeError("no such device")),
    "crash": _fail_to_load(KeyError("a bug")),
    "lost": _lose_a_frame,
    "capture": _fail_to_capture,
    "shape": _think_of_another_shape,
    "facts": _hold_other_rows,
    "lingers": _linger,
    "loads": lambda: setattr(model_runner, "load_model", _load_for_minutes),
}


def prepare_worker() -> None:
    """In a worker process before it begins."""
    ways = os.environ[WAYS].split()
    use(ways, setattr)
    for way in ways:
        if way in FAULTS:
            FAULTS[way]()


def use_on_all_ranks(ways: list[str], patch: pytest.MonkeyPatch, folder: Path) -> None:
    """In this process and in the workers that it starts; `folder`: an empty one."""
    if not ways:
        return
    use(ways, patch.setattr)
    # The name that Python imports by itself when it starts.
    (folder / "sitecustomize.py").write_text(
        f"from {__name__} import prepare_worker\nprepare_worker()\n"
    )
    patch.setenv(WAYS, " ".join(ways))
    patch.setattr(sys, "path", [str(folder), *sys.path])
