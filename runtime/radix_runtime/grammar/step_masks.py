"""PromisedMasks: the masks of one step, from the masker to the draw that waits for them."""

import threading
import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ..step_plan import Forward

# How long a draw waits for masks when the model has run: a row that sits a step out costs that row
# a whole step, and every moment of waiting costs all the others.
_PATIENCE = 0.1  # of the time that the model took
_LEAST_PATIENCE = 0.0005  # seconds
_LOOK_SECONDS = 0.001  # between two looks at a device that computes


class MaskSource(Protocol):
    """The masker as the masks of a step see it; `changed` guards it."""

    changed: threading.Condition  # notified when masks have come

    def is_missing(self, number: int) -> bool:
        """Whether the next mask of an answer has not come. That of an answer that has ended
        never is."""

    def collect(self, samples: Mapping[int, int], size: int) -> np.ndarray:
        """uint32 [size, words]: the masks of the answers `samples`, each for the sample that is
        named beside it. All other samples may be anything. The masks are used up by that."""


class PromisedMasks:
    """StepMasks of a Masker. The step has `size` samples; those of decode entries, which may be
    late, come first and are `num_optional`. Prompts are not computed twice: their masks are waited
    for."""

    def __init__(self, source: MaskSource, size: int, num_optional: int) -> None:
        self._source = source
        self._size = size
        self._num_optional = num_optional
        self._samples: dict[int, int] | None = None  # by answer; None until they are asked for
        self._asked_at = 0.0

    def ask_for(self, samples: Mapping[int, int]) -> None:
        """The masks of these answers are on their way, each for a sample of the step. The caller
        holds the lock of the source."""
        self._samples = dict(samples)
        self._asked_at = time.monotonic()
        self._source.changed.notify_all()

    def take(self, forward: Forward) -> tuple[np.ndarray, np.ndarray]:
        """StepMasks.take."""
        late = np.zeros(self._size, bool)
        with self._source.changed:
            while self._samples is None:
                self._source.changed.wait()
            missing = self._await(self._samples, forward)
            there = {n: sample for n, sample in self._samples.items() if n not in missing}
            words = self._source.collect(there, self._size)
        late[[self._samples[number] for number in missing]] = True
        return words, late

    def _await(self, samples: Mapping[int, int], forward: Forward) -> set[int]:
        """Waits until the step can be drawn. Returns the answers that are to sit it out."""
        deadline = None
        while True:
            missing = {number for number in samples if self._source.is_missing(number)}
            if not missing:
                return missing
            if deadline is None and not forward.is_running():
                deadline = self._deadline(forward)
            # Without anybody who could go on there is nothing to win.
            optional = all(samples[number] < self._num_optional for number in missing)
            may_go_on = optional and len(missing) < self._size
            if not may_go_on:
                self._source.changed.wait()
                continue
            if deadline is None:
                self._source.changed.wait(_LOOK_SECONDS)
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                return missing
            self._source.changed.wait(left)

    def _deadline(self, forward: Forward) -> float:
        now = time.monotonic()
        patience = max(_LEAST_PATIENCE, _PATIENCE * (now - forward.queued_at))
        # Masks that were asked for late had less time than the model.
        return max(now, self._asked_at) + patience
