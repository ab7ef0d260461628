"""Masker: which tokens each constrained answer may have next, from a process of its own."""

# The process writes masks into shared memory, so they cost this one, which runs the scheduler, a
# short message a step. A mask has a slot of its own there from the moment it is asked for until a
# draw has taken it, so a late one can be written when its step is long over.

import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from ..constraint import Constraint
from ..errors import RequestError
from .child import GrammarChild, unavailable
from .frames import Accepted, Close, Evicted, Fill, Filled, Frame, Hello, Open, Refused, RowFill
from .step_masks import PromisedMasks

# Slots for each sample of the largest step: one for the mask of an answer, the others for those
# that were still under way when their answer ended.
SLOTS = 4
FILL_TIMEOUT = 10.0  # seconds without a word while masks are due; then the process is killed
_MOST_FILL_SECONDS = 60.0  # for a mask, whatever the process does meanwhile
_ALL = np.uint32(0xFFFFFFFF)
_NOBODY = 0  # in the word that names the matcher at work

# Gets an answer that cannot go on, and why. Called on the thread of the process's frames.
OnFailure = Callable[[int, RequestError], None]


@dataclass(slots=True)
class _Answer:
    """One matcher. `ids` are the tokens that it has for sure: those of masks that came back.
    `wanted` is its next mask, from the moment it is asked for until it is taken."""

    open: Open
    ids: list[int]
    built: Future[None] = field(default_factory=Future)
    wanted: RowFill | None = None
    has_come: bool = False


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
        hello.mask_rows *= SLOTS
        words = hello.vocabulary.mask_words
        size = 4 * (1 + hello.mask_rows * words)
        self._descriptor = os.memfd_create("radix-masks")
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        os.ftruncate(self._descriptor, size)
        memory = np.frombuffer(mmap.mmap(self._descriptor, size), np.uint32)
        self._at_work = memory[:1]
        self._slots = memory[1:].reshape(hello.mask_rows, words)
        self._free_slots = list(range(hello.mask_rows))
        super().__init__(
            "radix_runtime.grammar.masker_process",
            "radix: grammar masks",
            hello,
            descriptors=[self._descriptor],
            options={"memory": self._descriptor},
        )
        self.changed = threading.Condition(self._lock)
        self._on_failure = on_failure
        self._wake = wake
        self._answers: dict[int, _Answer] = {}
        self._sent: dict[int, float] = {}  # when the masks under way were asked for, by answer
        self._free: deque[int] = deque()  # answers whose masks would allow everything from now on
        self._left: dict[int, int] = {}  # slots of masks under way whose answer has ended
        self._built_keys: dict[bytes, None] = {}  # grammars that the process has at hand
        self._alone = False
        self._heard_at = 0.0  # when the process said something last

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
            known = [number for number in numbers if number in self._answers]
            for number in known:
                self._forget(number)
            if known:
                self._send(Close(known))
                self.changed.notify_all()

    def take_free(self) -> list[int]:
        """Answers that may have any tokens from now on, each once or more: they can be closed."""
        free = []
        while self._free:
            free.append(self._free.popleft())
        return free

    def _forget(self, number: int) -> _Answer:
        answer = self._answers.pop(number)
        if answer.wanted is not None and number in self._sent:
            self._left[number] = answer.wanted.row  # the process still writes there
        elif answer.wanted is not None:
            self._free_slots.append(answer.wanted.row)
        return answer

    def promise(self, size: int, num_optional: int) -> PromisedMasks:
        """The masks of a step with `size` samples, of which the first `num_optional` may be late;
        `fill` must follow."""
        return PromisedMasks(self, size=size, num_optional=num_optional)

    def fill(self, masks: PromisedMasks, tokens: Mapping[int, tuple[int, list[int]]]) -> None:
        """Computes the masks of a step. `tokens[number]` is the sample of an answer and the tokens
        that are new since its last mask: none if that was late. All other samples may be anything,
        as may those of answers that have ended or fail."""
        with self._lock:
            fill = Fill([], alone=self._alone)
            samples: dict[int, int] = {}
            for number, (sample, ids) in tokens.items():
                answer = self._answers.get(number)
                if answer is None:
                    continue
                samples[number] = sample
                if answer.wanted is None:
                    row = self._free_slots.pop()
                    answer.wanted = RowFill(job=number, row=row, ids=ids)
                    answer.has_come = False
                    self._sent[number] = time.monotonic()
                    fill.rows.append(answer.wanted)
                else:
                    assert not ids, "an answer has gone on without its mask"
            if fill.rows:
                self._send(fill)
            masks.ask_for(samples)

    # MaskSource ---------------------------------------------------------------------------

    def is_missing(self, number: int) -> bool:
        """MaskSource.is_missing."""
        answer = self._answers.get(number)
        return answer is not None and not answer.has_come

    def collect(self, samples: Mapping[int, int], size: int) -> np.ndarray:
        """MaskSource.collect."""
        words = np.empty((size, self._slots.shape[1]), np.uint32)
        free = np.ones(size, bool)
        for number, sample in samples.items():
            answer = self._answers.get(number)
            if answer is None or answer.wanted is None:
                continue
            row = answer.wanted.row
            answer.wanted = None
            words[sample] = self._slots[row]
            free[sample] = False
            self._free_slots.append(row)
        words[free] = _ALL
        return words

    # The process --------------------------------------------------------------------------

    def _replay(self) -> None:
        """Answers whose masks are due come before those that may wait."""
        self._take_left_slots()  # of answers that have ended since the last process died
        for answer in self._answers.values():
            answer.open.ids = answer.ids
            answer.open.alone = self._alone
        for number in self._sent:
            self._send(self._answers[number].open)
        fill = Fill([], alone=self._alone)
        for number in self._sent:
            wanted = self._answers[number].wanted
            assert wanted is not None
            self._sent[number] = time.monotonic()
            fill.rows.append(wanted)
        if fill.rows:
            self._send(fill)
        for number, answer in self._answers.items():
            if number not in self._sent:
                self._send(answer.open)

    def _take(self, frame: Frame) -> None:
        self._heard_at = time.monotonic()
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
            case Filled(jobs, failed, free):
                self._finish_all(jobs, failed)
                self._free.extend(free)
            case Evicted(keys):
                for key in keys:
                    self._built_keys.pop(key, None)
            case _:
                raise TypeError(f"the masker sent a {type(frame).__name__}")
        if not self._sent and all(answer.built.done() for answer in self._answers.values()):
            self._alone = False

    def _tick(self) -> None:
        if not self._sent:
            return
        oldest = next(iter(self._sent.values()))
        now = time.monotonic()
        is_silent = now - max(oldest, self._heard_at) > FILL_TIMEOUT
        if is_silent or now - oldest > _MOST_FILL_SECONDS:
            self._kill("a mask takes too long")

    def _lost(self) -> None:
        culprit = int(self._at_work[0])
        self._at_work[0] = _NOBODY
        self._built_keys.clear()
        if culprit != _NOBODY:
            self._fail(culprit, grammar_failed("the process that computes masks died of it"))
        self._take_left_slots()
        self._alone = bool(self._answers)

    def _give_up(self) -> None:
        for number in list(self._answers):
            self._fail(number, unavailable())
        self._take_left_slots()

    def _take_left_slots(self) -> None:
        """Nobody writes to the slots of answers that have ended: the process has, too."""
        for number, row in self._left.items():
            del self._sent[number]
            self._free_slots.append(row)
        self._left.clear()

    def _finish_all(self, numbers: Iterable[int], failed: Mapping[int, str]) -> None:
        for number in numbers:
            self._finish(number)
        for number, reason in failed.items():
            self._fail(number, grammar_failed(reason))
        self.changed.notify_all()

    def _finish(self, number: int) -> None:
        """The mask of an answer is there."""
        del self._sent[number]
        row = self._left.pop(number, None)
        if row is not None:
            self._free_slots.append(row)
            return
        answer = self._answers[number]
        assert answer.wanted is not None
        answer.ids += answer.wanted.ids
        answer.has_come = True

    def _fail(self, number: int, error: RequestError) -> None:
        if number not in self._answers:
            return
        answer = self._forget(number)
        self._send(Close([number]))
        self.changed.notify_all()
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
