"""Compilers and masker: real processes, killed and replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import psutil
import pytest

from radix_runtime.constraint import Constraint
from radix_runtime.errors import RequestError
from radix_runtime.grammar import child, masker
from radix_runtime.grammar.backend import Compiled, Vocabulary
from radix_runtime.grammar.compilers import Compilers
from radix_runtime.grammar.frames import Hello
from radix_runtime.grammar.masker import Masker
from radix_runtime.grammar.masker_process import GrammarCache, hold_back
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.text.tokenizer import load_tokenizer

PATIENCE = 120  # seconds; the machine may have much else to do
SIZE = 1550  # more than the tokenizer has
EOS = 2
TOKENIZER = load_tokenizer(DEMO_MODEL_DIR)
VOCABULARY = Vocabulary.of(TOKENIZER, SIZE, [EOS])


def hello(**fields: float) -> Hello:
    return Hello("llguidance", vocabulary=VOCABULARY, threads=2, **fields)  # type: ignore[arg-type]


@pytest.fixture
def compilers() -> Iterator[Compilers]:
    processes = Compilers(hello(cpu_seconds=2.0))
    yield processes
    processes.close()


class MaskRig:
    """A masker with what it tells of failures; masks as sets of ids."""

    def __init__(self, rows: int = 8) -> None:
        self.failures: dict[int, RequestError] = {}
        self.masker = Masker(hello(cache_bytes=1 << 26, mask_rows=rows), self._failed)
        self.steps = 0

    def _failed(self, number: int, error: RequestError) -> None:
        self.failures[number] = error

    def open(self, number: int, regex: str, min_tokens: int = 0) -> None:
        constraint = Constraint("regex", regex)
        built = self.masker.open(number, constraint, stop_ids=[EOS], min_tokens=min_tokens)
        built.result(PATIENCE)

    def ask(self, **tokens: list[int]) -> Future[np.ndarray]:
        """Masks for the answers `a1`, `a2`..., which get these tokens first."""
        masks: Future[np.ndarray] = Future()
        rows = {int(name[1:]): (row, ids) for row, (name, ids) in enumerate(tokens.items())}
        self.masker.fill(self.steps, rows, masks, len(rows))
        self.steps += 1
        return masks

    def allowed(self, **tokens: list[int]) -> list[set[int]]:
        return [ids_of(row) for row in self.ask(**tokens).result(PATIENCE)]

    def kill(self) -> None:
        pid = self.masker.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def rig() -> Iterator[MaskRig]:
    made = MaskRig()
    yield made
    made.masker.close()


def ids_of(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def token(text: str) -> int:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) == 1
    return ids[0]


def texts_starting(*texts: str) -> set[int]:
    """The tokens that are a beginning of one of these texts."""
    found = set()
    for index in range(TOKENIZER.vocab_size):
        spelled = TOKENIZER.id_to_text(index)
        if index not in TOKENIZER.special_ids and spelled:
            if any(text.startswith(spelled) for text in texts):
                found.add(index)
    return found


def begins(mask: set[int], text: str) -> bool:
    """Whether a mask allows beginnings of `text` alone. Not all of them: what a grammar forces is
    cut into tokens as the model would."""
    return bool(mask) and mask <= texts_starting(text)


def wait(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


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
    masks: Future[np.ndarray] = Future()
    rig.masker.fill(0, {1: (1, []), 99: (2, [])}, masks, 4)
    found = masks.result(PATIENCE)
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
    one, two, ten = (ids_of(row) for row in masks.result(PATIENCE))
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
    assert not masks.done()
    os.kill(pid, signal.SIGKILL)
    assert begins(ids_of(masks.result(PATIENCE)[0]), "bc")
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
    assert begins(ids_of(masks.result(PATIENCE)[0]), "abc")
    assert rig.masker.pid != pid


def test_the_answer_at_work_in_a_second_death_is_given_up(rig: MaskRig) -> None:
    rig.open(1, "abc")
    rig.open(2, "abc")
    pid = rig.masker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    masks = rig.ask(a1=[], a2=[])
    rig.masker._at_work[0] = 2  # as the process says before it works for one alone
    os.kill(pid, signal.SIGKILL)
    assert begins(ids_of(masks.result(PATIENCE)[0]), "abc")
    assert list(rig.failures) == [2]


def test_a_given_up_masker_blocks_nobody(rig: MaskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.open(1, "abc")
    pid = rig.masker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    masks = rig.ask(a1=[])
    monkeypatch.setattr(rig.masker, "_dies_too_often", lambda: True)
    os.kill(pid, signal.SIGKILL)
    assert (masks.result(PATIENCE) == 0xFFFFFFFF).all()
    assert rig.failures[1].code == "grammar_unavailable"
    with pytest.raises(RequestError) as error:
        rig.open(2, "abc")
    assert error.value.status == 503


class CountingBackend:
    """Compiles anything to a matcher that is told apart by its text."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, constraint: Constraint) -> object:
        self.compiled.append(constraint.text)
        return Compiled(FakeMatcher(constraint.text), [])  # type: ignore[arg-type]


class FakeMatcher:
    def __init__(self, text: str) -> None:
        self.text = text

    def copy(self) -> FakeMatcher:
        return FakeMatcher(self.text)


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
