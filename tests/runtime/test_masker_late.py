"""Masks that are late: the process behind them, and who it serves first."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from radix_runtime.constraint import Constraint
from radix_runtime.grammar import masker_process
from radix_runtime.grammar.backend import Advance
from radix_runtime.grammar.frames import Accepted, Fill, Filled, Open, RowFill, read_frame
from radix_runtime.step_plan import Forward
from tests.runtime.mask_rig import VOCABULARY, CountingBackend, MaskRig, begins, hello, token, wait


@pytest.fixture
def rig() -> Iterator[MaskRig]:
    made = MaskRig()
    yield made
    made.masker.close()


def is_running(process: psutil.Process) -> bool:
    return process.status() != psutil.STATUS_STOPPED


@pytest.mark.parametrize("killed", [False, True])
def test_a_late_mask_serves_the_next_step(rig: MaskRig, killed: bool) -> None:
    for number in (1, 2, 3):
        rig.open(number, "abc")
    rig.allowed(a1=[], a2=[], a3=[])
    process = psutil.Process(rig.masker.pid)
    process.suspend()
    wait(lambda: not is_running(process))
    step = rig.masker.promise(4, 4)
    rig.masker.fill(step, {1: (3, [token("a")]), 2: (0, [token("a")]), 3: (1, [])})
    ran = Forward(queued_at=time.monotonic(), is_running=lambda: False)
    words, late = step.take(ran)
    assert late.tolist() == [True, True, False, True]
    assert (words[2] == 0xFFFFFFFF).all()
    rig.masker.close_answers([3])  # its mask is still under way
    if killed:
        process.kill()
    else:
        process.resume()
    first, second = rig.allowed(a2=[], a1=[])
    assert begins(first, "bc") and begins(second, "bc")
    assert begins(rig.allowed(a1=[token("b")])[0], "c")
    wait(lambda: len(rig.masker._free_slots) == len(rig.masker._slots))
    assert not rig.masker._left and not rig.masker._sent and not rig.failures


class SlowBackend(CountingBackend):
    """Masks of the grammar `slow` take half a second."""

    def fill(self, answers: list[Advance], rows: np.ndarray) -> None:
        if any(answer.matcher.text == "slow" for answer in answers):
            time.sleep(0.5)


def all_built(server: masker_process.MaskServer) -> bool:
    server._take_built()
    return all(answer.is_built for answer in server._answers.values())


@contextmanager
def mask_server(
    monkeypatch: pytest.MonkeyPatch, backend: CountingBackend, grammars: list[str]
) -> Iterator[tuple[masker_process.MaskServer, socket.socket]]:
    """A server in this process that has built a matcher of each grammar, and the other end of its
    connection."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(masker_process.grammar_backends, "get", lambda name: lambda v, n: backend)
    rows = np.zeros((len(grammars), VOCABULARY.mask_words), np.uint32)
    server = masker_process.MaskServer(
        theirs, hello=hello(cache_bytes=1 << 20), rows=rows, at_work=np.zeros(1, np.uint32)
    )
    with ours, theirs:
        for job, text in enumerate(grammars):
            server.handle(Open(job, Constraint("regex", text)))
        for _ in grammars:
            assert isinstance(read_frame(ours), Accepted)
        wait(lambda: all_built(server))
        yield server, ours


def test_a_slow_grammar_comes_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first mask nobody could foresee; from then on the others are there before it is."""
    monkeypatch.setattr(masker_process, "_SLOW_SECONDS", 0.2)
    with mask_server(monkeypatch, SlowBackend(), ["fast", "slow", "fast"]) as (server, ours):
        orders = []
        for _ in range(2):
            wanted = [RowFill(job=job, row=job, ids=[]) for job in (1, 0, 2)]
            server.handle(Fill(wanted))
            filled: list[list[int]] = []
            while sum(map(len, filled)) < 3:
                server._work()
                frame = read_frame(ours)
                assert isinstance(frame, Filled)
                filled.append(frame.jobs)
            orders.append(filled)
        assert orders == [[[1, 0, 2]], [[1], [0], [2]]]
        server.handle(Fill([RowFill(job=job, row=job, ids=[]) for job in (1, 0, 2)]))
        server._work()
        assert read_frame(ours) == Filled([0, 2])
        server._work()
        assert read_frame(ours) == Filled([1])


class SteadyBackend(CountingBackend):
    """A millisecond for each mask, half a second more where one is of the grammar `slow`."""

    def fill(self, answers: list[Advance], rows: np.ndarray) -> None:
        time.sleep(0.001 * len(answers))
        if any(answer.matcher.text == "slow" for answer in answers):
            time.sleep(0.5)


def test_many_masks_are_not_slow_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed at once, however long they take, unless one of them stands out."""
    monkeypatch.setattr(masker_process, "_SLOW_SECONDS", 0.02)
    monkeypatch.setattr(masker_process, "_USUAL_SECONDS", 0.003)
    with mask_server(monkeypatch, SteadyBackend(), [*["fast"] * 39, "slow"]) as (server, ours):
        fast = list(range(39))
        for _ in range(3):
            server.handle(Fill([RowFill(job=job, row=job, ids=[]) for job in fast]))
            server._work()
            assert read_frame(ours) == Filled(fast)
        everyone = [*fast, 39]
        server.handle(Fill([RowFill(job=job, row=job, ids=[]) for job in everyone]))
        server._work()
        assert read_frame(ours) == Filled(everyone)
        server.handle(Fill([RowFill(job=job, row=job, ids=[]) for job in everyone]))
        server._work()
        assert read_frame(ours) == Filled([0])  # they are told apart
