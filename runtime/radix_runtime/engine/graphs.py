"""StepGraphs: the parts of padded steps, each recorded once and replayed from then on."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from ..device import GraphRecorder

T = TypeVar("T")


class StepGraphs:
    """Runs parts of steps, as graphs where they were captured and as they are otherwise.

    A part is device work that reads and writes fixed addresses and follows from its key alone. Used
    on the engine's stream only."""

    def __init__(self, recorder: GraphRecorder | None) -> None:
        """Without a recorder nothing is captured."""
        self._recorder = recorder
        self._replays: dict[Hashable, Callable[[], None]] = {}
        self._results: dict[Hashable, Any] = {}
        self.capturing = False  # every part that runs now, and is not captured yet, is captured

    def __len__(self) -> int:
        return len(self._replays)

    def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """The result of `work`, of which `key` says all that it depends on. Its memory is written
        anew by the next run of the key, and of any other key unless this one was captured."""
        replay = self._replays.get(key)
        if replay is not None:
            replay()
            return self._results[key]
        result = work()
        if self.capturing and self._recorder is not None:
            # `work` has just run: what is slow or allocates once has happened.
            self._replays[key], self._results[key] = self._recorder.record(work)
        return result
