"""Compilers and masker: real processes, killed and replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import psutil
import pytest

from radix_runtime.constraint import Constraint
from radix_runtime.errors import RequestError
from radix_runtime.grammar import child, masker
from radix_runtime.grammar.compiler_process import Tries
from radix_runtime.grammar.compilers import Compilers
from radix_runtime.grammar.frames import Compile, Frame, Open, Refused
from radix_runtime.grammar.masker_process import GrammarCache, hold_back
from tests.runtime.mask_rig import (
    EOS,
    PATIENCE,
    SIZE,
    TOKENIZER,
    CountingBackend,
    MaskRig,
    begins,
    hello,
    ids_of,
    taken,
    texts_starting,
    token,
    wait,
)


@pytest.fixture
def compilers() -> Iterator[Compilers]:
    processes = Compilers(hello(cpu_seconds=2.0))
    yield processes
    processes.close()


@pytest.fixture
def rig() -> Iterator[MaskRig]:
    made = MaskRig()
    yield made
    made.masker.close()


# Compilers ------------------------------------------------------------------------------------


def test_verdicts(compilers: Compilers) -> None:
    good = compilers.compile(Constraint("regex", "a+"))
    bad = compilers.compile(Constraint("regex", "(?=a)b"))
    assert good.result(PATIENCE) == []
    with pytest.raises(RequestError) as error:
        bad.result(PATIENCE)
    assert (error.value.status, error.value.code) == (400, "invalid_grammar")
    # The same question is answered from memory.
    assert compilers.compile(Constraint("regex", "a+", param="regex")) is good
    assert compilers.compile(Constraint("regex", "(?=a)b")) is bad


def test_a_compiler_that_is_killed_loses_nothing(compilers: Compilers) -> None:
    compilers.compile(Constraint("regex", "a")).result(PATIENCE)
    pid = compilers.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    waiting = [compilers.compile(Constraint("regex", f"a{n}")) for n in range(5)]
    os.kill(pid, signal.SIGKILL)
    assert [future.result(PATIENCE) for future in waiting] == [[]] * 5
    assert compilers.pid != pid


def test_a_fork_serves_until_it_dies(compilers: Compilers) -> None:
    def fork_after(regex: str) -> psutil.Process:
        assert compilers.compile(Constraint("regex", regex)).result(PATIENCE) == []
        (fork,) = psutil.Process(compilers.pid).children()
        return fork

    fork = fork_after("a")
    assert fork_after("b") == fork
    fork.kill()
    fork = fork_after("c")
    fork.suspend()
    tried_again = compilers.compile(Constraint("regex", "d"))
    fork.kill()
    assert tried_again.result(PATIENCE) == []  # it may not have been the cause
    assert fork_after("e") != fork


class Deadly:
    """A backend that kills whoever compiles."""

    def compile(self, constraint: Constraint) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_grammar_that_kills_a_new_fork_is_refused() -> None:
    backend: Any = Deadly()
    tries = Tries(backend, slots=1, cpu_seconds=10)
    tries.add(Compile(7, constraint=Constraint("regex", "a")))
    ((key, _),) = tries.selector.select(PATIENCE)
    verdict = tries.read(key.data)
    assert isinstance(verdict, Refused)
    assert (verdict.job, verdict.status, verdict.code) == (7, 400, "grammar_too_complex")
    assert not tries.is_busy


def test_limits_of_a_grammar_end_that_grammar_alone() -> None:
    compilers = Compilers(hello(cpu_seconds=0.05))
    try:
        # Some 100,000 rules: seconds for whoever reads them.
        slow = Constraint("lark", "start: r0\n" + "\n".join(_rules(60_000)))
        pid_before = compilers.compile(Constraint("regex", "a")).result(PATIENCE), compilers.pid
        refused = compilers.compile(slow)
        other = compilers.compile(Constraint("regex", "b+"))
        with pytest.raises(RequestError) as error:
            refused.result(PATIENCE)
        assert error.value.code == "grammar_too_complex" and error.value.status == 400
        assert other.result(PATIENCE) == []
        assert (pid_before[0], compilers.pid) == pid_before  # no process was started again
    finally:
        compilers.close()


def _rules(count: int) -> list[str]:
    return [f'r{i}: "a" r{i + 1} | "b"' for i in range(count)] + [f'r{count}: "c"']


def test_a_process_that_keeps_dying_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "DEATH_WINDOW", 600.0)
    compilers = Compilers(hello(cpu_seconds=2.0))
    try:
        for round in range(child.MAX_DEATHS):
            compilers.compile(Constraint("regex", f"a{round}")).result(PATIENCE)
            pid = compilers.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait(lambda old=pid: compilers.pid != old or compilers._thread is None)
        with pytest.raises(RequestError) as error:
            compilers.compile(Constraint("regex", "b")).result(PATIENCE)
        assert (error.value.status, error.value.code) == (503, "grammar_unavailable")
    finally:
        compilers.close()


# The masker -----------------------------------------------------------------------------------


def test_masks_follow_the_answers(rig: MaskRig) -> None:
    rig.open(1, "ab+c")
    rig.open(2, "[0-9]{2}")
    first, second = rig.allowed(a1=[], a2=[])
    assert first == texts_starting("abc", *["a" + "b" * n for n in range(1, 6)])
    assert second == {index for index in range(SIZE) if _is_number(index, 2)}
    assert all(index < TOKENIZER.vocab_size for index in first | second)
    first, second = rig.allowed(a1=[token("a")], a2=[token("7")])
    assert token("b") in first and token("c") not in first
    assert second == {index for index in range(SIZE) if _is_number(index, 1)}
    _, second = rig.allowed(a1=[], a2=[token("3")])
    assert second == {EOS}  # nothing but the end


def _is_number(index: int, most: int) -> bool:
    spelled = TOKENIZER.id_to_text(index)
    return spelled.isascii() and spelled.isdigit() and len(spelled) <= most


def test_rows_of_nobody_allow_everything(rig: MaskRig) -> None:
    rig.open(1, "a")
    masks = rig.masker.promise(4, 0)
    rig.masker.fill(masks, {1: (1, []), 99: (2, [])})
    found = taken(masks)
    assert (found[[0, 2, 3]] == 0xFFFFFFFF).all()
    assert ids_of(found[1]) == {token("a")}


def test_min_tokens_hold_the_end_back(rig: MaskRig) -> None:
    rig.open(1, "a*", min_tokens=2)
    rig.open(2, "a", min_tokens=2)
    for _ in range(2):
        assert EOS not in rig.allowed(a1=[])[0]
        rig.allowed(a1=[token("a")])
    assert EOS in rig.allowed(a1=[])[0]
    assert rig.allowed(a2=[token("a")]) == [{EOS}]  # the grammar wins


def test_hold_back_leaves_something() -> None:
    mask = np.array([0b110, 1], np.uint32)
    hold_back(mask, [1, 32])
    assert mask.tolist() == [0b100, 0]
    hold_back(mask, [2])
    assert mask.tolist() == [0b100, 0]


def test_a_token_that_was_not_allowed_ends_the_answer_alone(rig: MaskRig) -> None:
    rig.open(1, "ab")
    rig.open(2, "ab")
    rig.allowed(a1=[token("c")], a2=[token("a")])
    assert list(rig.failures) == [1]
    assert (rig.failures[1].status, rig.failures[1].code) == (500, "grammar_failed")
    assert rig.allowed(a2=[])[0] == {token("b")}


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_masker_that_is_killed_is_replaced(rig: MaskRig, rounds: int) -> None:
    for number in (1, 2, 3):
        rig.open(number, "(abc){3}")
    spelled = "abcabcabc"
    for length in range(rounds):
        rig.allowed(a1=[token(spelled[length])], a2=[], a3=[])
        rig.kill()
        rig.open(10 + length, "x")  # while it is down
    rig.kill()
    masks = rig.ask(a1=[], a2=[token("a")], a10=[])
    one, two, ten = (ids_of(row) for row in taken(masks))
    assert begins(one, spelled[rounds:])
    assert begins(two, "bcabcabc")
    assert ten == {token("x")}
    assert not rig.failures


def test_masks_under_way_survive_a_kill(rig: MaskRig) -> None:
    rig.open(1, "abc")
    pid = rig.masker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    masks = rig.ask(a1=[token("a")])
    assert rig.masker.is_missing(1)
    os.kill(pid, signal.SIGKILL)
    assert begins(ids_of(taken(masks)[0]), "bc")
    assert rig.allowed(a1=[token("b")]) == [{token("c")}]  # `a` was taken once


def test_a_masker_that_hangs_is_replaced(rig: MaskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.open(1, "abc")
    pid = rig.masker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(masker, "FILL_TIMEOUT", 0.5)
    masks = rig.ask(a1=[])
    wait(lambda: not psutil.pid_exists(pid))
    monkeypatch.undo()  # the new one has its time
    assert begins(ids_of(taken(masks)[0]), "abc")
    assert rig.masker.pid != pid


def open_many(rig: MaskRig, count: int) -> list[Future[None]]:
    """Answers whose frames are more than a socket holds."""
    grammars = [Constraint("regex", "a" * 500 + str(number)) for number in range(count)]
    return [
        rig.masker.open(number, grammar, stop_ids=[EOS], min_tokens=0)
        for number, grammar in enumerate(grammars, start=10)
    ]


def test_nobody_waits_for_a_masker_that_does_not_read(rig: MaskRig) -> None:
    """As while it starts on a busy machine. Everything is sent later."""
    rig.open(1, "abc")
    pid = rig.masker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    built = open_many(rig, 1_500)  # would wait for ever
    assert rig.masker._unsent
    os.kill(pid, signal.SIGCONT)
    for one in built:
        one.result(PATIENCE)
    assert rig.masker.pid == pid and not rig.masker._unsent and not rig.failures
    assert begins(rig.allowed(a1509=[])[0], "a" * 500)


def test_a_masker_that_reads_nothing_is_replaced(
    rig: MaskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.open(1, "abc")
    pid = rig.masker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(child, "SEND_TIMEOUT", 0.5)
    built = open_many(rig, 1_500)
    wait(lambda: not psutil.pid_exists(pid))
    monkeypatch.undo()
    for one in built:
        one.result(PATIENCE)
    assert rig.masker.pid != pid and not rig.failures


def test_a_new_masker_is_told_of_due_masks_first(
    rig: MaskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        rig.open(number, "abc")
    pid = rig.masker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    masks = rig.ask(a3=[])
    told: list[Frame] = []
    with monkeypatch.context() as patched, rig.masker._lock:
        patched.setattr(rig.masker, "_send", told.append)
        rig.masker._replay()
    assert [type(frame).__name__ for frame in told] == ["Open", "Fill", "Open", "Open"]
    assert [frame.job for frame in told if isinstance(frame, Open)] == [3, 1, 2]
    os.kill(pid, signal.SIGCONT)
    taken(masks)


def test_a_masker_at_work_is_not_killed(rig: MaskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says something has not come to the mask yet; but not for ever."""
    killed: list[str] = []
    monkeypatch.setattr(rig.masker, "_kill", killed.append)
    now = time.monotonic()
    for asked, heard, is_killed in ((11, 1, False), (11, 11, True), (5, 99, False), (61, 1, True)):
        killed.clear()
        rig.masker._sent = {1: now - asked}
        rig.masker._heard_at = now - heard
        rig.masker._tick()
        assert bool(killed) == is_killed, (asked, heard)
    rig.masker._sent = {}


def test_the_answer_at_work_in_a_second_death_is_given_up(rig: MaskRig) -> None:
    rig.open(1, "abc")
    rig.open(2, "abc")
    pid = rig.masker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    masks = rig.ask(a1=[], a2=[])
    rig.masker._at_work[0] = 2  # as the process says before it works for one alone
    os.kill(pid, signal.SIGKILL)
    assert begins(ids_of(taken(masks)[0]), "abc")
    assert list(rig.failures) == [2]


def test_a_given_up_masker_blocks_nobody(rig: MaskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.open(1, "abc")
    pid = rig.masker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    masks = rig.ask(a1=[])
    monkeypatch.setattr(rig.masker, "_dies_too_often", lambda: True)
    os.kill(pid, signal.SIGKILL)
    assert (taken(masks) == 0xFFFFFFFF).all()
    assert rig.failures[1].code == "grammar_unavailable"
    with pytest.raises(RequestError) as error:
        rig.open(2, "abc")
    assert error.value.status == 503


def test_the_cache_drops_what_was_used_least_recently() -> None:
    backend = CountingBackend()
    cache = GrammarCache(backend, capacity=3 * (64 << 10))  # type: ignore[arg-type]
    grammars = [Constraint("regex", str(n)) for n in range(4)]
    for grammar in grammars[:3]:
        assert cache.build(grammar)[1] == []
    assert cache.find(grammars[0].key) is not None
    assert cache.build(grammars[3])[1] == [grammars[1].key]
    assert cache.find(grammars[1].key) is None
    assert cache.build(grammars[0])[1] == []
    assert backend.compiled == ["0", "1", "2", "3"]


def test_the_end_waits_for_no_process() -> None:
    """One that is busy, here because it is stopped, is killed."""
    processes = Compilers(hello())
    processes.begin()
    deadline = time.monotonic() + PATIENCE
    while processes.pid is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process = psutil.Process(processes.pid)
    process.suspend()
    thread = processes._thread
    assert thread is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "_END_SECONDS", 10 * PATIENCE)
        processes.close()
        thread.join(PATIENCE)
    assert not thread.is_alive() and not process.is_running()
