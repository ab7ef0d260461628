"""Compilers: real processes, killed and replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from radix_runtime.constraint import Constraint
from radix_runtime.errors import RequestError
from radix_runtime.grammar import child
from radix_runtime.grammar.compiler_process import Tries
from radix_runtime.grammar.compilers import Compilers
from radix_runtime.grammar.frames import Compile, Refused
from tests.runtime.mask_rig import PATIENCE, hello, wait


@pytest.fixture
def compilers() -> Iterator[Compilers]:
    processes = Compilers(hello(cpu_seconds=2.0))
    yield processes
    processes.close()


def test_verdicts(compilers: Compilers) -> None:
    good = compilers.compile(Constraint("regex", "a+"))
    bad = compilers.compile(Constraint("regex", "(?=a)b"))
    assert good.result(PATIENCE) == []
    with pytest.raises(RequestError) as error:
        bad.result(PATIENCE)
    assert (error.value.status, error.value.code) == (400, "invalid_grammar")
    assert "look-around" in error.value.message
    for text in ("root ::= foo", 'x ::= "a"'):
        with pytest.raises(RequestError, match="rule .*found|not found") as error:
            compilers.compile(Constraint("ebnf", text)).result(PATIENCE)
        assert error.value.code == "invalid_grammar"
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
