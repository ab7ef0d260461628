"""What a JSON body may be made of, found by one pass over its bytes before anything parses it."""

import asyncio
from typing import NamedTuple

import numpy as np

from ..errors import refusal

MAX_DEPTH = 160  # a JSON Schema of 64 levels, each a keyword and a name, and what is around it
MAX_CONTAINERS = 20_000  # arrays and objects of one body
MAX_NUMBER = 128  # characters of one number

_SHORT_BYTES = 32 << 10  # are looked at within a fraction of a millisecond
_QUOTE = ord('"')
_COMMA = ord(",")
_OPENS = np.zeros(256, dtype=bool)
_OPENS[list(b"[{")] = True
_STEPS = np.zeros(256, dtype=np.int32)  # what a byte adds to the depth
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
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
    structure = _outside_strings(data)
    count = int(np.count_nonzero(_OPENS[structure]))
    if count > MAX_CONTAINERS:
        message = f"JSON of more than {MAX_CONTAINERS} arrays and objects"
        raise refusal("invalid_json", message)
    if count > MAX_DEPTH and _depth(structure) > MAX_DEPTH:
        raise refusal("invalid_json", f"JSON nested deeper than {MAX_DEPTH}")
    if _longest_number(structure) > MAX_NUMBER:
        raise refusal("invalid_json", f"a number of more than {MAX_NUMBER} characters")
    return Shape(containers=count, commas=int(np.count_nonzero(structure == _COMMA)))


async def check_shape_aside(data: bytes) -> Shape:
    """`check_shape`, on another thread where it takes long: numpy lets the event loop run
    meanwhile. Raises RequestError."""
    if len(data) <= _SHORT_BYTES:
        return check_shape(data)
    return await asyncio.to_thread(check_shape, data)


def _outside_strings(data: bytes) -> np.ndarray:
    """uint8 [n]: the bytes of a JSON text less what its strings contain."""
    if b"\\" in data:  # an escaped quotation mark does not end a string
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(data, dtype=np.uint8)
    # The number of quotation marks up to each byte, modulo 256; inside of a string it is odd.
    quotes = np.cumsum(text == _QUOTE, dtype=np.uint8)
    return text[(quotes & 1) == 0]


def _depth(structure: np.ndarray) -> int:
    return int(np.cumsum(_STEPS[structure], dtype=np.int32).max())


def _longest_number(structure: np.ndarray) -> int:
    others = np.flatnonzero(~_OF_NUMBERS[structure])
    return int(np.diff(others, prepend=-1, append=len(structure)).max()) - 1
