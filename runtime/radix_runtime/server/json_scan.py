"""What a JSON body may be made of, found by one pass over its bytes before anything parses it."""

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..errors import refusal

MAX_DEPTH = 160  # a JSON Schema of 64 levels, each a keyword and a name, and what is around it
MAX_CONTAINERS = 20_000  # arrays and objects of one body
MAX_NUMBER = 128  # characters of one number

_SHORT_BYTES = 32 << 10  # are looked at within a fraction of a millisecond
_CHUNK = 64 << 10  # bytes looked at together: what is made of them stays in the cache
_QUOTE = ord('"')
_COMMA = ord(",")
_CASE = 0x20  # the bit in which "[" differs from "{", "]" from "}", and no other byte from these
_OF_NUMBERS = np.zeros(256, dtype=bool)
_OF_NUMBERS[list(b"0123456789+-.eE")] = True


class Shape(NamedTuple):
    """How many arrays and objects, and how many commas, a JSON text has outside of strings."""

    containers: int
    commas: int

    @property
    def parts(self) -> int:
        """No fewer than half of the values that a parser builds."""
        return self.containers + self.commas


def check_shape(data: bytes) -> Shape:
    """What a JSON text is made of. Raises RequestError if it has too many, is
    nested too deep, or has a number that is too long.

    Needs no valid JSON: up to its first error, which is as far as a parser gets, a text is bounded
    like a valid one. The shape of its beginning is no more than its own. About 5 ns a byte."""
    scan = _Scan()
    for structure in _outside_strings(data):
        scan.add(structure)
        if scan.containers > MAX_CONTAINERS:
            message = f"JSON of more than {MAX_CONTAINERS} arrays and objects"
            raise refusal("invalid_json", message)
    if scan.deepest > MAX_DEPTH:
        raise refusal("invalid_json", f"JSON nested deeper than {MAX_DEPTH}")
    if scan.longest_number > MAX_NUMBER:
        raise refusal("invalid_json", f"a number of more than {MAX_NUMBER} characters")
    return Shape(containers=scan.containers, commas=scan.commas)


async def check_shape_aside(data: bytes) -> Shape:
    """`check_shape`, on another thread where it takes long: numpy lets the event loop run
    meanwhile. Raises RequestError."""
    if len(data) <= _SHORT_BYTES:
        return check_shape(data)
    return await asyncio.to_thread(check_shape, data)


def _outside_strings(data: bytes) -> Iterator[np.ndarray]:
    """The bytes of a JSON text less what its strings contain, uint8 [n] piece by piece."""
    if b"\\" in data:  # an escaped quotation mark does not end a string
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(data, dtype=np.uint8)
    # The number of quotation marks up to each byte, modulo 256; inside of a string it is odd.
    before = np.uint8(0)
    for start in range(0, len(text), _CHUNK):
        part = text[start : start + _CHUNK]
        quotes = np.cumsum(part == _QUOTE, dtype=np.uint8)
        quotes += before
        before = quotes[-1]
        yield part[(quotes & 1) == 0]


class _Scan:
    """What has been found in the pieces so far."""

    def __init__(self) -> None:
        self.containers = 0
        self.commas = 0
        self.deepest = 0
        self.longest_number = 0
        self._depth = 0
        self._number = 0  # characters of the one that the next piece may go on with

    def add(self, structure: np.ndarray) -> None:
        """Looks at the next piece, of bytes outside of strings."""
        self.commas += int(np.count_nonzero(structure == _COMMA))
        folded = structure | _CASE
        opens = folded == ord("{")
        closes = folded == ord("}")
        count = int(np.count_nonzero(opens))
        if count:
            self.containers += count
            steps = np.subtract(opens, closes, dtype=np.int8)
            levels = np.cumsum(steps, dtype=np.int32)
            self.deepest = max(self.deepest, self._depth + int(levels.max()))
        self._depth += count - int(np.count_nonzero(closes))
        self._measure_numbers(structure)

    def _measure_numbers(self, structure: np.ndarray) -> None:
        others = np.flatnonzero(~_OF_NUMBERS[structure])
        if len(others) == 0:
            self._number += len(structure)
            self.longest_number = max(self.longest_number, self._number)
            return
        first = self._number + int(others[0])
        self._number = len(structure) - 1 - int(others[-1])
        between = int(np.diff(others).max(initial=1)) - 1
        self.longest_number = max(self.longest_number, first, between, self._number)
