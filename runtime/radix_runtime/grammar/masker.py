"""Masker: which tokens each constrained answer may have next, from a process of its own."""

# The process writes masks into shared memory, so they cost this one, which runs the scheduler, a
# short message a step. The number of banks is more than steps can be in flight: a bank is written
# again only when the draw that reads it is over.

import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from ..constraint import Constraint
from ..errors import RequestError
from .child import GrammarChild, unavailable
from .frames import Accepted, Close, Evicted, Fill, Filled, Frame, Hello, Open, Refused, RowFill

BANKS = 4
FILL_TIMEOUT = 10.0  # seconds for the masks of a step; then the process is killed
_ALL = np.uint32(0xFFFFFFFF)
_NOBODY = 0  # in the word that names the matcher at work

# Gets an answer that cannot go on, and why. Called on the thread of the process's frames.
OnFailure = Callable[[int, RequestError], None]


@dataclass(slots=True)
class _Answer:
    """One matcher. `ids` are the tokens that it has for sure: those of masks that came back."""

    open: Open
    ids: list[int]
    built: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class _Step:
    """Masks that are awaited, in rows of one bank."""

    fill: Fill
    masks: Future[np.ndarray]
    rows: np.ndarray
    sent: float = 0.0


class Masker(GrammarChild):
    """The matchers of all constrained answers, by numbers that the caller chooses (from 1 on).

    Thread-safe. A process that dies is replaced, and each matcher built again from its grammar and
    the tokens so far. Then matchers work one by one until all that was under way is done; the one
    at work when the process dies again is given up, which `on_failure` tells. `wake` is called when
    `built` of an answer is done."""

    def __init__(
        self, hello: Hello, on_failure: OnFailure, wake: Callable[[], None] = lambda: None
    ) -> None:
        """`hello.mask_rows` is the number of rows that a step may have."""
        bank_rows = hello.mask_rows
        words = hello.vocabulary.mask_words
        size = 4 * (1 + BANKS * bank_rows * words)
        self._descriptor = os.memfd_create("radix-masks")
        os.ftruncate(self._descriptor, size)
        memory = np.frombuffer(mmap.mmap(self._descriptor, size), np.uint32)
        self._at_work = memory[:1]
        self._banks = memory[1:].reshape(BANKS, bank_rows, words)
        self._bank_rows = bank_rows
        hello.mask_rows = BANKS * bank_rows
        super().__init__(
            "radix_runtime.grammar.masker_process",
            "radix: grammar masks",
            hello,
            descriptors=[self._descriptor],
            options={"memory": self._descriptor},
        )
        self._on_failure = on_failure
        self._wake = wake
        self._answers: dict[int, _Answer] = {}
        self._steps: dict[int, _Step] = {}
        self._built_keys: dict[bytes, None] = {}  # grammars that the process has at hand
        self._alone = False

    # Answers ------------------------------------------------------------------------------

    def open(
        self, number: int, constraint: Constraint, *, stop_ids: Sequence[int], min_tokens: int
    ) -> Future[None]:
        """Prepares the matcher of a new answer; done at once if its grammar is at hand. The future
        raises RequestError. Raises RequestError 503."""
        with self._lock:
            self.begin()
            frame = Open(number, constraint, stop_ids=list(stop_ids), min_tokens=min_tokens)
            answer = self._answers[number] = _Answer(frame, [])
            if constraint.key in self._built_keys:
                answer.built.set_result(None)
            self._send(frame)
            return answer.built

    def close_answers(self, numbers: Iterable[int]) -> None:
        """These answers have ended."""
        with self._lock:
            known = [number for number in numbers if self._answers.pop(number, None) is not None]
            if known:
                self._send(Close(known))

    def fill(
        self,
        step: int,
        tokens: Mapping[int, tuple[int, list[int]]],
        masks: Future[np.ndarray],
        size: int,
    ) -> None:
        """Gives `masks` those of a step with `size` samples, uint32 [size, words].
        `tokens[number]` is the sample of an answer and the tokens that are new since its last mask.
        All other samples may be anything, as may those of answers that have ended or fail."""
        with self._lock:
            bank = step % BANKS
            rows = self._banks[bank][:size]
            free = np.ones(size, bool)
            free[[row for row, _ in tokens.values()]] = False
            rows[free] = _ALL
            first = bank * self._bank_rows
            fill = Fill(step, rows=[], alone=self._alone)
            for number, (row, ids) in tokens.items():
                fill.rows.append(RowFill(job=number, row=first + row, ids=ids))
            waiting = self._steps[step] = _Step(
                fill=fill, masks=masks, rows=rows, sent=time.monotonic()
            )
            if self._thread is None:  # it has been given up, and every answer with it
                rows[:] = _ALL
                self._finish(waiting, {})
            else:
                self._send(fill)

    # The process --------------------------------------------------------------------------

    def _replay(self) -> None:
        for answer in self._answers.values():
            answer.open.ids = answer.ids
            answer.open.alone = self._alone
            self._send(answer.open)
        for step in self._steps.values():
            step.fill.alone = self._alone
            step.sent = time.monotonic()
            self._send(step.fill)

    def _take(self, frame: Frame) -> None:
        match frame:
            case Accepted(job):
                answer = self._answers.get(job)
                if answer is not None:
                    self._built_keys[answer.open.constraint.key] = None
                    if not answer.built.done():
                        answer.built.set_result(None)
                        self._wake()
            case Refused(job):
                self._fail(job, frame.to_error())
            case Filled(number, failed):
                self._finish(self._steps[number], failed)
            case Evicted(keys):
                for key in keys:
                    self._built_keys.pop(key, None)
            case _:
                raise TypeError(f"the masker sent a {type(frame).__name__}")
        if not self._steps and all(answer.built.done() for answer in self._answers.values()):
            self._alone = False

    def _tick(self) -> None:
        if self._steps:
            oldest = next(iter(self._steps.values()))
            if time.monotonic() - oldest.sent > FILL_TIMEOUT:
                self._kill(f"the masks of step {oldest.fill.number} take too long")

    def _lost(self) -> None:
        culprit = int(self._at_work[0])
        self._at_work[0] = _NOBODY
        self._built_keys.clear()
        if culprit != _NOBODY:
            self._fail(culprit, grammar_failed("the process that computes masks died of it"))
        self._alone = bool(self._answers)

    def _give_up(self) -> None:
        for number in list(self._answers):
            self._fail(number, unavailable())
        for step in list(self._steps.values()):
            step.rows[:] = _ALL
            self._finish(step, {})

    def _finish(self, step: _Step, failed: Mapping[int, str]) -> None:
        """The masks of a step are there."""
        del self._steps[step.fill.number]
        for fill in step.fill.rows:
            answer = self._answers.get(fill.job)
            if answer is not None:
                answer.ids += fill.ids
        for job, reason in failed.items():
            self._fail(job, grammar_failed(reason))
        step.masks.set_result(step.rows)

    def _fail(self, number: int, error: RequestError) -> None:
        answer = self._answers.pop(number, None)
        if answer is None:
            return
        if answer.built.done():
            self._on_failure(number, error)
        else:
            answer.built.set_exception(error)
        self._wake()


def grammar_failed(reason: str) -> RequestError:
    """The error of an answer whose matcher cannot go on."""
    return RequestError(
        status=500, code="grammar_failed", message=f"the grammar cannot go on: {reason}"
    )
