"""Rows whose masks are late sit a step out, at random, among random requests: every token is what
it would have been, and nothing is left behind."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from radix_runtime.constraint import Constraint
from radix_runtime.grammar.step_masks import PromisedMasks
from radix_runtime.step_plan import Forward
from tests.runtime.random_traffic import Traffic, check_coverage, check_end, drive
from tests.runtime.scheduler_rig import Rig

FULL = bool(os.environ.get("RADIX_TEST_FULL"))
TOTAL = 4_000 if FULL else 800


def has_run() -> Forward:
    """The model has just run, in no time."""
    return Forward(queued_at=time.monotonic(), is_running=lambda: False)


class ScriptedMasks:
    """The masker of grammars that allow everything. It keeps the tokens that it is told."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.told: dict[int, list[int]] = {}
        self.names: dict[int, tuple[str, int]] = {}  # request id and choice
        self.opened: dict[str, int] = {}
        self.late = 0
        self.free: set[int] = set()

    def begin(self) -> None:
        """It runs."""

    def open(
        self, number: int, constraint: Constraint, *, stop_ids: Sequence[int], min_tokens: int
    ) -> Future[None]:
        rid = constraint.text
        self.names[number] = (rid, self.opened.get(rid, 0))
        self.opened[rid] = self.names[number][1] + 1
        self.told[number] = []
        built: Future[None] = Future()
        built.set_result(None)
        return built

    def close_answers(self, numbers: Sequence[int]) -> None:
        """Nothing to free."""

    def take_free(self) -> list[int]:
        """Now and then an answer that goes on without masks."""
        begun = [number for number, ids in self.told.items() if ids]
        if not begun or self.rng.random() < 0.95:
            return []
        self.free.add(self.rng.choice(begun[-4:]))
        return list(self.free)

    def promise(self, size: int, num_optional: int) -> ScriptedStep:
        return ScriptedStep(self, size=size, num_optional=num_optional)

    def fill(self, masks: ScriptedStep, tokens: Mapping[int, tuple[int, list[int]]]) -> None:
        samples = [sample for sample, _ in tokens.values()]
        assert len(set(samples)) == len(samples)
        for number, (_, ids) in tokens.items():
            assert number not in self.free, "nothing is asked of it any more"
            self.told[number] += ids
        masks.samples = samples


class ScriptedStep:
    """StepMasks of ScriptedMasks."""

    def __init__(self, masks: ScriptedMasks, size: int, num_optional: int) -> None:
        self.masks = masks
        self.size = size
        self.num_optional = num_optional
        self.samples: list[int] | None = None

    def take(self, forward: Forward) -> tuple[np.ndarray, np.ndarray]:
        assert self.samples is not None, "the step before has completed: they have been asked for"
        late = np.zeros(self.size, bool)
        for sample in self.samples:
            late[sample] = sample < self.num_optional and self.masks.rng.random() < 0.3
        if late.all():
            late[self.masks.rng.randrange(self.size)] = False
        self.masks.late += int(late.sum())
        return np.full((self.size, 4), 0xFFFFFFFF, np.uint32), late


SETTINGS: list[dict[str, Any]] = [
    {"page_size": 1, "pages": 160, "chunk": 16},
    {"page_size": 4, "pages": 48, "chunk": 24, "schedule_policy": "lpm"},
    {"page_size": 16, "pages": 14, "chunk": -1, "overlap": False},
    {"page_size": 4, "pages": 40, "chunk": 32, "disable_radix_cache": True},
    {"page_size": 8, "pages": 24, "chunk": 20, "lazy": False, "samples": 4},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings["page_size"]))
def test_random_requests(settings: dict[str, Any]) -> None:
    """With aborts in every state, forced retraction, choices, text stops, NaN rows and drafts."""
    seed = random.SystemRandom().getrandbits(32) if FULL else 7
    print(f"seed {seed}")
    masks = ScriptedMasks(seed)
    rig = Rig(
        rows=8,
        schedule_conservativeness=0.2,
        max_queued_requests=40,
        make_masks=lambda on_failure, wake: masks,
        **settings,
    )
    submit = rig.submit

    def constrained(rid: str, ids: object, **fields: Any) -> object:
        if masks.rng.random() < 0.5:
            fields["constraint"] = Constraint("regex", rid)
        return submit(rid, ids, **fields)

    rig.submit = constrained  # type: ignore[method-assign, assignment]
    traffic = Traffic(rig, seed)
    drive(traffic, TOTAL // len(SETTINGS))
    check_end(traffic)
    check_coverage(traffic)
    told = {name: masks.told[number] for number, name in masks.names.items()}
    for (rid, choice), ids in told.items():
        stream = rig.streams.get((rid, choice))
        if stream is not None and rid not in rig.failed and stream.cut is None:
            assert ids == stream.ids[: len(ids)], (rid, choice)
    assert masks.late > 100
    free = {masks.names[number] for number in masks.free}
    assert any(len(rig.streams[name].ids) > len(told[name]) for name in free & set(rig.streams))
    assert rig.scheduler.counters.late_masks_total == masks.late


class ScriptedSource:
    """MaskSource: masks come when the test says so."""

    def __init__(self, missing: set[int]) -> None:
        self.changed = threading.Condition()
        self.missing = missing
        self.collected: dict[int, int] = {}

    def is_missing(self, number: int) -> bool:
        return number in self.missing

    def collect(self, samples: Mapping[int, int], size: int) -> np.ndarray:
        self.collected = dict(samples)
        return np.zeros((size, 1), np.uint32)

    def bring(self, number: int) -> None:
        with self.changed:
            self.missing.discard(number)
            self.changed.notify_all()


def promised(source: ScriptedSource, size: int, optional: int, **at: int) -> PromisedMasks:
    """Masks of a step, asked for: the answer `a1` has the sample `at["a1"]`."""
    masks = PromisedMasks(source, size=size, num_optional=optional)
    with source.changed:
        masks.ask_for({int(name[1:]): sample for name, sample in at.items()})
    return masks


def test_who_is_late_when_the_model_has_run() -> None:
    source = ScriptedSource({2})
    _, late = promised(source, 3, 3, a1=0, a2=1).take(has_run())
    assert late.tolist() == [False, True, False]
    assert source.collected == {1: 0}
    source.bring(2)
    _, late = promised(source, 3, 3, a1=0, a2=1).take(has_run())
    assert not late.any() and source.collected == {1: 0, 2: 1}


@pytest.mark.parametrize(("optional", "size"), [(1, 3), (2, 2)], ids=["prompt", "nobody else"])
def test_what_a_step_waits_for(optional: int, size: int) -> None:
    """The mask of a prompt, and masks without which nothing would be drawn."""
    source = ScriptedSource({1, 2})
    masks = promised(source, size, optional, a1=0, a2=1)
    taken: Future[tuple[np.ndarray, np.ndarray]] = Future()
    thread = threading.Thread(target=lambda: taken.set_result(masks.take(has_run())))
    thread.start()
    thread.join(0.05)
    assert not taken.done()
    source.bring(2)
    _, late = taken.result(60)
    assert late.tolist() == [True] + [False] * (size - 1)
    assert source.collected == {2: 1}
    thread.join()


def test_nobody_is_late_while_the_model_runs() -> None:
    source = ScriptedSource({1})
    looks = 0

    def is_running() -> bool:
        nonlocal looks
        looks += 1
        if looks == 5:
            source.bring(1)
        return True

    _, late = promised(source, 2, 2, a1=0).take(Forward(queued_at=0.0, is_running=is_running))
    assert not late.any() and looks >= 5
