"""The masker: a real process, killed and replaced."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest

from radix_runtime.constraint import Constraint
from radix_runtime.errors import RequestError
from radix_runtime.grammar import child, masker
from radix_runtime.grammar.frames import Close, Frame, Open
from radix_runtime.grammar.masker_process import GrammarCache, hold_back
from tests.runtime.mask_rig import (
    EOS,
    PATIENCE,
    SIZE,
    TOKENIZER,
    CountingBackend,
    MaskRig,
    begins,
    ids_of,
    taken,
    texts_starting,
    token,
    wait,
)


@pytest.fixture
def rig() -> Iterator[MaskRig]:
    made = MaskRig()
    yield made
    made.masker.close()


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


def test_the_process_forgets_an_answer_that_fails(
    rig: MaskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.open(1, "ab")
    sent: list[Frame] = []
    send = rig.masker._send

    def send_and_keep(frame: Frame) -> None:
        sent.append(frame)
        send(frame)

    monkeypatch.setattr(rig.masker, "_send", send_and_keep)
    rig.allowed(a1=[token("c")])
    rig.masker.close_answers([1])  # by its owner, which has heard of it
    assert [frame.jobs for frame in sent if isinstance(frame, Close)] == [[1]]


def test_the_memory_of_masks_is_given_back() -> None:
    masker = MaskRig().masker
    memory = file_of(masker._descriptor)
    assert memory in open_files()
    masker.close()
    del masker
    gc.collect()
    assert memory not in open_files()


def open_files() -> set[tuple[int, int]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            found.add(file_of(int(name)))
    return found


def file_of(descriptor: int) -> tuple[int, int]:
    """What tells an open file from all others."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_masker_that_is_killed_is_replaced(rig: MaskRig, rounds: int) -> None:
    for number in (1, 2, 3):
        rig.open(number, "(abc){3}")
    spelled = "abcabcabc"
    for length in range(rounds):
        rig.allowed(a1=[token(spelled[length])], a2=[], a3=[])
        rig.kill()
        rig.open(10 + length, "x")  # while it is down
        wait(lambda: not rig.masker._alone)  # a matcher at work when it dies would be blamed
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


def test_an_answer_that_ends_while_the_masker_is_replaced(
    rig: MaskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mask was under way: the new process is not asked for it, and others get theirs."""
    rig.open(1, "abc")
    rig.open(2, "abc")
    free = sorted(rig.masker._free_slots)
    pid = rig.masker.pid
    assert pid is not None
    start = rig.masker._start

    def start_later() -> Any:
        rig.masker.close_answers([1])
        return start()

    monkeypatch.setattr(rig.masker, "_start", start_later)
    os.kill(pid, signal.SIGSTOP)
    masks = rig.ask(a1=[], a2=[])
    os.kill(pid, signal.SIGKILL)
    wait(lambda: not rig.masker.is_missing(2))
    assert begins(ids_of(taken(masks)[1]), "abc")
    assert sorted(rig.masker._free_slots) == free and not rig.failures


def test_a_fault_in_reading_frames_is_a_death(
    rig: MaskRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread goes on with a new process; nobody waits for ever."""
    rig.open(1, "abc")
    take = rig.masker._take
    faults = [KeyError(7)]

    def take_later(frame: Frame) -> None:
        if faults:
            raise faults.pop()
        take(frame)

    pid = rig.masker.pid
    monkeypatch.setattr(rig.masker, "_take", take_later)
    assert begins(rig.allowed(a1=[])[0], "abc")
    assert rig.masker.pid != pid and "KeyError: 7" in caplog.text


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


def narrow(rig: MaskRig) -> None:
    """The socket to the process holds little, whatever the machine's default is."""
    connection = rig.masker._socket
    assert connection is not None
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)


def test_nobody_waits_for_a_masker_that_does_not_read(rig: MaskRig) -> None:
    """As while it starts on a busy machine. Everything is sent later."""
    rig.open(1, "abc")
    pid = rig.masker.pid
    assert pid is not None
    narrow(rig)
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
    narrow(rig)
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
