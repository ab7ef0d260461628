"""Lazy views of a checkpoint's tensors: a part of one, or the same elements in another order. What
is not indexed is not read."""

from abc import ABC, abstractmethod
from typing import Any, Protocol


class TensorSource(Protocol):
    """A tensor of a checkpoint that is read only where it is indexed (safetensors' slice)."""

    def get_shape(self) -> list[int]:
        """The sizes of its dimensions."""
        ...

    def __getitem__(self, index: Any) -> Any:
        """A torch tensor: the elements at a slice, or at a tuple of slices."""
        ...


class TensorView(ABC):
    """A TensorSource over another. A subclass says where its elements lie."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    @abstractmethod
    def get_shape(self) -> list[int]:
        """The sizes of the view's dimensions."""

    @abstractmethod
    def read(self, ranges: list[slice]) -> Any:
        """The elements in `ranges`: a slice with start and stop, of step 1, for each dimension."""

    def __getitem__(self, index: Any) -> Any:
        shape = self.get_shape()
        given = list(index) if isinstance(index, tuple) else [index]
        given += [slice(None)] * (len(shape) - len(given))
        bounds = [part.indices(size) for part, size in zip(given, shape, strict=True)]
        return self.read([slice(start, stop) for start, stop, _ in bounds])


class Rows(TensorView):
    """Rows [first, first + count) of the first dimension."""

    def __init__(self, source: TensorSource, *, first: int, count: int) -> None:
        super().__init__(source)
        self._first = first
        self._count = count

    def get_shape(self) -> list[int]:
        return [self._count, *self._source.get_shape()[1:]]

    def read(self, ranges: list[slice]) -> Any:
        rows = slice(ranges[0].start + self._first, ranges[0].stop + self._first)
        index = (rows, *ranges[1:])
        return self._source[index]


class EverySecondRow(TensorView):
    """Rows `first`, first + 2, first + 4, ... of the first dimension."""

    def __init__(self, source: TensorSource, *, first: int) -> None:
        super().__init__(source)
        self._first = first

    def get_shape(self) -> list[int]:
        rows, *others = self._source.get_shape()
        return [rows // 2, *others]

    def read(self, ranges: list[slice]) -> Any:
        rows = slice(2 * ranges[0].start, 2 * ranges[0].stop)  # files are not read with steps
        index = (rows, *ranges[1:])
        return self._source[index][self._first :: 2]


class Item(TensorView):
    """Element `index` of the first dimension, without that dimension."""

    def __init__(self, source: TensorSource, *, index: int) -> None:
        super().__init__(source)
        self._index = index

    def get_shape(self) -> list[int]:
        return self._source.get_shape()[1:]

    def read(self, ranges: list[slice]) -> Any:
        index = (slice(self._index, self._index + 1), *ranges)
        return self._source[index][0]


class Transposed(TensorView):
    """The last two dimensions exchanged."""

    def get_shape(self) -> list[int]:
        *others, rows, columns = self._source.get_shape()
        return [*others, columns, rows]

    def read(self, ranges: list[slice]) -> Any:
        *others, rows, columns = ranges
        index = (*others, columns, rows)
        return self._source[index].transpose(-1, -2)


class Flattened(TensorView):
    """The last two dimensions as one. Reads whole rows of the last."""

    def get_shape(self) -> list[int]:
        *others, rows, columns = self._source.get_shape()
        return [*others, rows * columns]

    def read(self, ranges: list[slice]) -> Any:
        *others, elements = ranges
        columns = self._source.get_shape()[-1]
        first = elements.start // columns
        last = -(-elements.stop // columns)
        index = (*others, slice(first, last), slice(0, columns))
        before = first * columns
        flat = self._source[index].flatten(-2)
        return flat[..., elements.start - before : elements.stop - before]
