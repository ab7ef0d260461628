"""The process that keeps the matchers of constrained answers and computes their masks."""

import json
import mmap
import os
import queue
import select
import socket
import sys
import threading
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..constraint import Constraint
from ..errors import RequestError
from .backend import Advance, GrammarBackend, Matcher
from .frames import (
    Accepted,
    Close,
    Evicted,
    Fill,
    Filled,
    Frame,
    Hello,
    Open,
    Refused,
    RowFill,
    pack_frame,
    read_frame,
)
from .reasoning_budget import BudgetKeeper
from .registry import grammar_backends

_BUILDER_NICENESS = 3  # masks come before new grammars
_BUILDER_STACK = 64 << 20  # more than a compiler's: what that has passed must not crash here
_SLOW_SECONDS = 0.002  # of a mask, beyond what those that are computed with it usually take
_USUAL_SECONDS = 50e-6  # of one mask among several, at most; what they take here is learnt
_LEARNING = 0.1  # of a new measurement
_LEAST_BYTES = 64 << 10  # that a grammar counts for
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ALL = np.uint32(0xFFFFFFFF)


class GrammarCache:
    """Compiled grammars that no answer has moved on, least recently used ones going first, up to
    `capacity` bytes. A grammar counts for what the process has grown by while it was compiled."""

    def __init__(self, backend: GrammarBackend, capacity: int) -> None:
        self._backend = backend
        self._capacity = capacity
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, tuple[Matcher, int]] = OrderedDict()
        self._bytes = 0

    def find(self, key: bytes) -> Matcher | None:
        """A new matcher of a grammar that is at hand."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0].copy()

    def build(self, constraint: Constraint) -> tuple[Matcher, list[bytes]]:
        """A new matcher, and the keys of what had to go. Raises RequestError."""
        key = constraint.key
        found = self.find(key)
        if found is not None:
            return found, []
        before = _resident_bytes()
        base = self._backend.compile(constraint).matcher
        size = max(_LEAST_BYTES, _resident_bytes() - before)
        evicted = []
        with self._lock:
            self._entries[key] = (base, size)
            self._bytes += size
            while self._bytes > self._capacity and len(self._entries) > 1:
                oldest, (_, freed) = self._entries.popitem(last=False)
                self._bytes -= freed
                evicted.append(oldest)
        return base.copy(), evicted


@dataclass(slots=True)
class _Answer:
    """A matcher and what its masks must hold back; None until it is built, if it cannot be, or for
    any tokens. `wanted`: a mask that was asked for before. A slow one is computed by itself."""

    opened: Open
    matcher: Matcher | None = None
    budget: BudgetKeeper | None = None
    length: int = 0
    is_built: bool = False
    wanted: RowFill | None = None
    is_slow: bool = False

    @property
    def is_free(self) -> bool:
        """Whether the answer may have any tokens from now on."""
        if self.opened.constraint.kind != "any" or self.length < self.opened.min_tokens:
            return False
        return self.budget is None or self.budget.is_done


class MaskServer:
    """Answers the frames of a Masker. `rows` are the masks in shared memory, `at_work` the word
    that names a matcher which works alone.

    Masks that were slow the last time come after all others, one by one, and frames that have
    arrived meanwhile before the next of them."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        hello: Hello,
        rows: np.ndarray,
        at_work: np.ndarray,
    ) -> None:
        self._connection = connection
        self._rows = rows
        self._at_work = at_work
        self._vocabulary = hello.vocabulary
        self._backend = grammar_backends.get(hello.backend)(hello.vocabulary, hello.threads)
        self._cache = GrammarCache(self._backend, hello.cache_bytes)
        self._answers: dict[int, _Answer] = {}
        self._fast: list[RowFill] = []
        self._slow: deque[tuple[RowFill, bool]] = deque()  # and whether nothing else may work
        self._usual_seconds = _USUAL_SECONDS
        self._to_build: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._built: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # of the builder
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._news, select.POLLIN)
        self._send_lock = threading.Lock()
        threading.stack_size(_BUILDER_STACK)
        threading.Thread(target=self._build_all, name="builder", daemon=True).start()

    def run(self) -> None:
        """Until the connection ends: EOFError, OSError."""
        while True:
            has_work = bool(self._fast or self._slow)
            ready = self._poll.poll(0 if has_work else None)
            if not ready:
                self._work()
            for descriptor, _ in ready:
                if descriptor == self._news:
                    self._take_built()
                else:
                    self.handle(read_frame(self._connection))

    def handle(self, frame: Frame) -> None:
        """Does what a frame asks for; masks are computed later."""
        match frame:
            case Open():
                self._open(frame)
            case Close(jobs):
                for job in jobs:
                    self._answers.pop(job, None)
            case Fill():
                for fill in frame.rows:
                    self._plan(fill, frame.alone)
            case _:
                raise TypeError(f"a masker got a {type(frame).__name__}")

    # Grammars -----------------------------------------------------------------------------

    def _open(self, frame: Open) -> None:
        answer = self._answers[frame.job] = _Answer(frame)
        if frame.constraint.budget is not None:
            answer.budget = BudgetKeeper(frame.constraint.budget, self._vocabulary)
        if frame.constraint.kind == "any":
            accepted = self._start(answer, None)
            answer.is_built = True
            self._send(accepted)
            return
        if frame.alone:
            self._at_work[0] = frame.job
            frames = self._build(answer)
            answer.is_built = True
            self._at_work[0] = 0
            self._send(*frames)
            if self._fast or self._slow:  # masks do not wait for all that is to be built
                self._work()
            return
        matcher = self._cache.find(frame.constraint.key)
        if matcher is None:
            self._to_build.put(answer)
        else:
            frames = [self._start(answer, matcher)]
            answer.is_built = True
            self._send(*frames)

    def _build_all(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BUILDER_NICENESS)
        while True:
            answer = self._to_build.get()
            self._send(*self._build(answer))
            self._built.put(answer)
            os.eventfd_write(self._news, 1)

    def _take_built(self) -> None:
        """Plans the masks that had to wait for their grammar."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._news)
        while not self._built.empty():
            answer = self._built.get()
            answer.is_built = True
            if answer.wanted is not None:
                self._plan(answer.wanted, alone=False)
                answer.wanted = None

    def _build(self, answer: _Answer) -> list[Frame]:
        """Compiles the grammar of an answer, and what is to be told then."""
        try:
            matcher, evicted = self._cache.build(answer.opened.constraint)
        except RequestError as error:
            return [Refused.of(answer.opened.job, error)]
        frames: list[Frame] = [Evicted(evicted)] if evicted else []
        return [*frames, self._start(answer, matcher)]

    def _start(self, answer: _Answer, matcher: Matcher | None) -> Frame:
        if matcher is not None:
            matcher.accept(answer.opened.ids)
        if answer.budget is not None:
            answer.budget.accept(answer.opened.ids)
        answer.length = len(answer.opened.ids)
        answer.matcher = matcher
        return Accepted(answer.opened.job)

    # Masks --------------------------------------------------------------------------------

    def _plan(self, fill: RowFill, alone: bool) -> None:
        answer = self._answers.get(fill.job)
        if answer is not None and not answer.is_built:
            answer.wanted = fill
        elif alone or (answer is not None and answer.is_slow):
            self._slow.append((fill, alone))
        else:
            self._fast.append(fill)

    def _work(self) -> None:
        """Computes the masks that are fast, or if there are none a slow one."""
        if self._fast:
            fills = self._fast
            self._fast = []
            self._fill(fills)
            return
        fill, alone = self._slow.popleft()
        if alone:
            self._at_work[0] = fill.job
        self._fill([fill])

    def _fill(self, fills: list[RowFill]) -> None:
        advances: list[Advance] = []
        answers: dict[int, _Answer] = {}  # by row
        for fill in fills:
            answer = self._answers.get(fill.job)
            if answer is None:  # it has ended
                self._rows[fill.row] = _ALL
                continue
            answer.length += len(fill.ids)
            if answer.budget is not None:
                answer.budget.accept(fill.ids)
            answers[fill.row] = answer
            if answer.matcher is None:  # it may have any tokens, or was refused
                self._rows[fill.row] = _ALL
                continue
            advances.append(Advance(matcher=answer.matcher, ids=fill.ids, row=fill.row))
        began = time.perf_counter()
        if advances:
            self._backend.fill(advances, self._rows)
        # Of several nobody knows whose fault it was: the next time they are told apart.
        is_slow = self._were_slow(len(advances), time.perf_counter() - began)
        failed = {}
        for row, answer in answers.items():
            answer.is_slow = is_slow
            error = None if answer.matcher is None else answer.matcher.error
            if error is not None:
                self._rows[row] = _ALL
                failed[answer.opened.job] = error
                continue
            if answer.length < answer.opened.min_tokens:
                hold_back(self._rows[row], answer.opened.stop_ids)
            if answer.budget is not None:
                answer.budget.force(self._rows[row])
        free = [answer.opened.job for answer in answers.values() if answer.is_free]
        self._at_work[0] = 0  # who is killed from here on has died of no mask
        self._send(Filled([fill.job for fill in fills], failed=failed, free=free))

    def _were_slow(self, count: int, seconds: float) -> bool:
        """Whether one of so many masks, which were computed together, took much longer than they
        usually do."""
        if seconds > _SLOW_SECONDS + 2 * count * self._usual_seconds:
            return True
        if count:
            usual = min(seconds / count, _USUAL_SECONDS)
            self._usual_seconds += _LEARNING * (usual - self._usual_seconds)
        return False

    def _send(self, *frames: Frame) -> None:
        data = b"".join(pack_frame(frame) for frame in frames)
        with self._send_lock:
            self._connection.sendall(data)


def hold_back(mask: np.ndarray, ids: list[int]) -> None:
    """Takes `ids` out of a mask, uint32 [words], unless it allows nothing else."""
    kept = mask.copy()
    for token in ids:
        kept[token // 32] &= ~np.uint32(1 << token % 32)
    if kept.any():
        mask[:] = kept


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def main() -> None:
    """Answers until the process that uses this one has gone."""
    options: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    with socket.socket(fileno=options["socket"]) as connection:
        try:
            hello = read_frame(connection)
            assert isinstance(hello, Hello)
            words = hello.vocabulary.mask_words
            size = 4 * (1 + hello.mask_rows * words)
            memory = np.frombuffer(mmap.mmap(options["memory"], size), np.uint32)
            rows = memory[1:].reshape(hello.mask_rows, words)
            server = MaskServer(connection, hello=hello, rows=rows, at_work=memory[:1])
            server.run()
        except (EOFError, OSError):
            os._exit(0)  # the threads need not end first
