"""The numbers of a request that steps change, which lie in columns while it has a row
(`rows.py`)."""

from enum import IntEnum
from typing import Protocol

import numpy as np


class Column(IntEnum):
    """What `Request.numbers` and the columns of `Rows` hold; see `Request` for their meaning."""

    SEQ = 0
    PROMPT_LEN = 1
    MAX_TOTAL_LEN = 2
    NUM_IDS = 3
    TOTAL_LEN = 4
    COMPUTED_LEN = 5
    RESERVED_LEN = 6
    NUM_PAGES = 7
    LAST_STEP = 8
    SENT = 9


class _HasNumbers(Protocol):
    numbers: np.ndarray


class Number:
    """An integer of a request that steps change: in its row's column while it has a row."""

    def __init__(self, column: Column) -> None:
        self._column = int(column)

    def __get__(self, request: _HasNumbers, owner: type) -> int:
        value: int = request.numbers.item(self._column)
        return value

    def __set__(self, request: _HasNumbers, value: int) -> None:
        request.numbers[self._column] = value
