"""JSON that is encoded piece by piece, so that a long answer need not be built at once."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

to_json = msgspec.json.Encoder().encode

_PIECE = 64 << 10  # bytes of what is already encoded


class Rows:
    """An array of `count` entries, each of which is made when it is encoded and may be Rows itself.
    It is encoded once."""

    def __init__(self, entries: Iterable[Any], count: int) -> None:
        self.entries = entries
        self._count = count

    def __len__(self) -> int:
        return self._count

    def pieces(self) -> Iterator[bytes]:
        """The array as JSON, an entry at a time."""
        before = b"["
        for entry in self.entries:
            if isinstance(entry, Rows):
                yield before
                yield from entry.pieces()
            else:
                yield before + to_json(entry)
            before = b","
        yield b"]" if before == b"," else b"[]"


class GrowingRows:
    """An array that is encoded whenever it has grown; each entry is encoded only once."""

    def __init__(self) -> None:
        self._encoded = bytearray()
        self._new: list[Iterable[Any]] = []

    def extend(self, entries: Iterable[Any]) -> None:
        """Appends entries, which are made when they are encoded."""
        self._new.append(entries)

    def pieces(self) -> Iterator[bytes]:
        """The array so far as JSON; empty pieces while its new entries are being encoded."""
        for entries in self._new:
            for entry in entries:
                if self._encoded:
                    self._encoded += b","
                self._encoded += to_json(entry)
                yield b""
        self._new = []
        yield b"["
        for start in range(0, len(self._encoded), _PIECE):
            yield bytes(self._encoded[start : start + _PIECE])
        yield b"]"


def json_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of `value`, which may have Rows and GrowingRows in its objects and in arrays of
    objects."""
    if isinstance(value, Rows | GrowingRows):
        yield from value.pieces()
    elif isinstance(value, dict):
        before = b"{"
        for key, part in value.items():
            yield before + to_json(key) + b":"
            yield from json_pieces(part)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        before = b"["
        for part in value:
            yield before
            yield from json_pieces(part)
            before = b","
        yield b"]"
    else:
        yield to_json(value)
