"""Numbers that all API processes of a server see at once: words of shared memory."""

import mmap
import os
from collections.abc import Sequence

# Each API process has a row, which only it writes, and which all read. A process that takes more of
# something writes its number first and looks at the others' afterwards. Of two that do so at once
# at least one sees the other and takes it back: so much is never kept that a bound of the whole
# server is passed. Where both see each other both take it back, although there was room for one.

# The columns of a row.
CONNECTIONS = 0  # that are open
CHOICES = 1  # that calls hold of the queue
BYTES = 2  # the same
WAITING_TOKENS = 3  # work of requests that wait for their first token
DONE_TOKENS = 4  # work done since the start
OPEN_CALLS = 5  # that an end of the server would cut off
SPEED_TOKENS = 6  # work that the engine has done lately,
SPEED_MILLISECONDS = 7  # in so much time
READY = 8  # 1: it takes requests
_COLUMNS = 9  # and one for each key behind them

# The words before the rows: when requests are refused from, time.monotonic_ns(); 0: they are not.
_DRAINED_FROM = 0  # as an operator has asked; any process writes it
_ENDS_FROM = 1  # for good
_ROWS = 2
_WORD_BYTES = 8


class SharedNumbers:
    """The numbers of `processes` API processes, of which this one is number `process`. `keys` are
    those (Caller.key) whose requests are counted together in all processes.

    `descriptor` is of the shared memory; None: this process keeps them for itself, as where it is
    the only one."""

    def __init__(
        self,
        processes: int = 1,
        process: int = 0,
        keys: Sequence[str] = (),
        descriptor: int | None = None,
    ) -> None:
        self.processes = processes
        self.process = process
        self._columns = {key: _COLUMNS + number for number, key in enumerate(keys)}
        size = _size(processes, keys)
        memory = bytearray(size) if descriptor is None else mmap.mmap(descriptor, size)
        self._words = memoryview(memory).cast("q")
        width = _COLUMNS + len(keys)
        self._own = _ROWS + process * width
        rows = range(_ROWS, _ROWS + processes * width, width)
        self._others = [row for row in rows if row != self._own]

    def publish(self, column: int, value: int) -> None:
        """The number of this process."""
        self._words[self._own + column] = value

    def elsewhere(self, column: int) -> int:
        """The sum of the others' numbers."""
        return sum([self._words[row + column] for row in self._others])

    def everywhere(self, column: int) -> int:
        """The sum of all numbers, with that of this process."""
        return self._words[self._own + column] + self.elsewhere(column)

    def is_ahead(self, column: int) -> bool:
        """Whether another process has a smaller number, by more than an eighth of this one's."""
        own = self._words[self._own + column]
        least = min((self._words[row + column] for row in self._others), default=own)
        return own - least > own >> 3

    def publish_key(self, key: str, value: int) -> None:
        """The choices of a key in this process. Nothing is noted of a key that is not counted."""
        column = self._columns.get(key)
        if column is not None:
            self.publish(column, value)

    def elsewhere_of_key(self, key: str) -> int:
        """The choices of a key in the others; 0 for one that is not counted."""
        column = self._columns.get(key)
        return 0 if column is None else self.elsewhere(column)

    @property
    def drained_from(self) -> int:
        """When new requests are refused from, because an operator has asked for it; 0: never."""
        return self._words[_DRAINED_FROM]

    @drained_from.setter
    def drained_from(self, when: int) -> None:
        self._words[_DRAINED_FROM] = when

    @property
    def ends_from(self) -> int:
        """When new requests are refused from, because the server ends; 0: never."""
        return self._words[_ENDS_FROM]

    @ends_from.setter
    def ends_from(self, when: int) -> None:
        self._words[_ENDS_FROM] = when


def create_memory(processes: int, keys: Sequence[str]) -> int:
    """The descriptor of new shared memory for these."""
    descriptor = os.memfd_create("radix-api")
    os.ftruncate(descriptor, _size(processes, keys))
    return descriptor


def _size(processes: int, keys: Sequence[str]) -> int:
    return _WORD_BYTES * (_ROWS + processes * (_COLUMNS + len(keys)))
