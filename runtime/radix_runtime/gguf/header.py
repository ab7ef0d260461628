"""The header of a GGUF file: metadata, and where each tensor lies. Everything that it says is
checked against the size of the file, so that a broken download costs no time and a lying one no
memory."""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from .types import READABLE, BlockType, block_type

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # 1 counted in 32 bits
_ALIGNMENT = 32  # of tensors, unless general.alignment says otherwise
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4
_STRING = 8
_ARRAY = 9
_SCALARS = {  # the types of metadata values by number: as `struct` spells them
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies in the file, from byte `start` on, and of which type it is. `shape`: rows
    before columns, as torch has it (the file lists the innermost first)."""

    shape: tuple[int, ...]
    type: BlockType
    start: int

    @property
    def row_bytes(self) -> int:
        """The bytes of the innermost dimension."""
        return self.shape[-1] // self.type.elements * self.type.size

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in the file."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A GGUF file that is mapped into memory. `metadata`: its values by key; an array is a list of
    strings or a numpy array. `tensors`: by the file's names, in its order."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    data: mmap.mmap

    def has_tensor(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.tensors

    def blocks(self, entry: TensorEntry) -> np.ndarray:
        """The bytes of a tensor, uint8, with the tensor's shape but for the last dimension, which
        is a row's bytes. Read-only memory of the file: what is not touched is not read."""
        flat = np.frombuffer(self.data, dtype=np.uint8, count=entry.nbytes, offset=entry.start)
        return flat.reshape(*entry.shape[:-1], entry.row_bytes)


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as GGUF files do, or is called like one."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def open_gguf(path: Path) -> GgufFile:
    """The file's header, checked. Raises ConfigError, one line that names the file and the key or
    tensor that is wrong."""
    try:
        state = path.stat()
        return _open(path, state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


@lru_cache(maxsize=2)  # a process asks for the configuration, the tokenizer and the tensors
def _open(path: Path, size: int, changed: int) -> GgufFile:
    if size < len(_MAGIC):
        raise ConfigError(f"{path} is no GGUF file: it has {size} bytes")
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return _Reader(path, data).read()


class _Reader:
    """A cursor over the header. Every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._what = "the header"  # what is being read, for messages

    def read(self) -> GgufFile:
        """The whole header. Raises ConfigError."""
        num_tensors, num_values = self._counts()
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            self._what = "the metadata"
            key = self._string()
            self._what = f"metadata key {key!r}"
            if key in metadata:
                raise self._wrong("is there twice")
            metadata[key] = self._value(self._number("I"))
        entries: dict[str, tuple[tuple[int, ...], BlockType, int]] = {}
        for _ in range(num_tensors):
            self._what = "the table of tensors"
            name = self._string()
            self._what = f"tensor {name!r}"
            if name in entries:
                raise self._wrong("is there twice")
            entries[name] = self._entry()
        alignment = self._alignment(metadata)
        start = -(-self._at // alignment) * alignment
        tensors = {
            name: TensorEntry(shape=shape, type=kind, start=start + offset)
            for name, (shape, kind, offset) in entries.items()
        }
        self._check_places(tensors, start=start, alignment=alignment)
        return GgufFile(path=self._path, metadata=metadata, tensors=tensors, data=self._data)

    def _counts(self) -> tuple[int, int]:
        """How many tensors and metadata values the file says it has."""
        magic = self._bytes(len(_MAGIC))
        if magic != _MAGIC:
            raise ConfigError(f"{self._path} is no GGUF file: it begins with {magic!r}")
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in _VERSIONS:
                raise ConfigError(f"{self._path}: a big-endian GGUF file is not supported")
            raise ConfigError(
                f"{self._path}: GGUF version {version} is not supported, only 2 and 3"
            )
        num_tensors = self._number("Q")
        num_values = self._number("Q")
        # A tensor takes 32 bytes of the header at least, a value 13.
        if num_tensors * 32 + num_values * 13 > len(self._data) - self._at:
            raise self._wrong(
                f"promises {num_tensors} tensors and {num_values} metadata values, more than the "
                f"{len(self._data)} bytes of the file can hold"
            )
        return num_tensors, num_values

    def _entry(self) -> tuple[tuple[int, ...], BlockType, int]:
        """A row of the table of tensors: shape, type, offset in the data."""
        dimensions = self._number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._wrong(f"has {dimensions} dimensions")
        sizes = struct.unpack(f"<{dimensions}Q", self._bytes(8 * dimensions))
        number = self._number("I")
        kind = block_type(number)
        if kind is None:
            raise self._wrong(f"is of type {number}, which ggml does not have")
        if min(sizes) < 1:
            raise self._wrong(f"has shape {list(reversed(sizes))}")
        if sizes[0] % kind.elements:
            raise self._wrong(
                f"has rows of {sizes[0]} elements, no multiple of {kind.elements} ({kind.name})"
            )
        return tuple(reversed(sizes)), kind, self._number("Q")

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        self._what = "metadata key 'general.alignment'"
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        is_valid = isinstance(alignment, int) and 8 <= alignment <= _MAX_ALIGNMENT
        if not is_valid or alignment % 8:
            raise self._wrong(f"is {alignment!r}, expected a multiple of 8")
        return int(alignment)

    def _check_places(
        self, tensors: Mapping[str, TensorEntry], *, start: int, alignment: int
    ) -> None:
        """Raises ConfigError for a tensor that lies outside of the file or over another."""
        end = start
        before = ""
        for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
            self._what = f"tensor {name!r}"
            if entry.type.name not in READABLE:
                kinds = ", ".join(READABLE)
                raise self._wrong(f"is of type {entry.type.name}; supported: {kinds}")
            if (entry.start - start) % alignment:
                raise self._wrong(f"begins at byte {entry.start}, which is not aligned")
            if entry.start < end:
                raise self._wrong(f"overlaps tensor {before!r}")
            end = entry.start + entry.nbytes
            before = name
            if end > len(self._data):
                raise self._wrong(
                    f"ends at byte {end}, but the file has {len(self._data)}: "
                    "the download is incomplete"
                )

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        raise self._wrong(f"has a value of type {kind}, which GGUF does not have")

    def _array(self) -> Any:
        kind = self._number("I")
        count = self._number("Q")
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind]) if kind != 7 else np.dtype("bool")
            return np.frombuffer(self._bytes(count * dtype.itemsize), dtype=dtype)
        if kind != _STRING:
            raise self._wrong(f"is an array of type {kind}, which is not supported")
        if count * 8 > len(self._data) - self._at:
            raise self._wrong(f"promises {count} strings, more than the file can hold")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """As `_string` so many times: a vocabulary and its merges take hundreds of thousands."""
        data = self._data
        length_of = struct.Struct("<Q").unpack_from
        at = self._at
        last = len(data) - 8
        found = []
        try:
            for _ in range(count):
                if at > last:
                    break
                begin = at + 8
                at = begin + length_of(data, at)[0]
                found.append(data[begin:at].decode("utf-8"))
        except UnicodeDecodeError:
            raise self._wrong("is not UTF-8") from None
        if len(found) < count or at > len(data):
            raise self._wrong(f"goes beyond the end of the file ({len(data)} bytes)")
        self._at = at
        return found

    def _string(self) -> str:
        text = self._bytes(self._number("Q"))
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            raise self._wrong("is not UTF-8") from None

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))[0]

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise self._wrong(f"goes beyond the end of the file ({len(self._data)} bytes)")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: {self._what} {what}")
