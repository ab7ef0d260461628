"""Views and rules that undo what llama.cpp's converter does to the tensors of a checkpoint."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..families.names import Named
from ..families.tensor_views import TensorSource, TensorView


class SplitPairs(TensorView):
    """The rows of a product to queries or keys with the halves of each head one after the other.
    The file has them in turn: row 2 i of a head is row i of the first half."""

    def __init__(self, source: TensorSource, *, heads: int) -> None:
        super().__init__(source)
        self._head_rows = source.get_shape()[0] // heads

    def get_shape(self) -> list[int]:
        return self._source.get_shape()

    def read(self, ranges: list[slice]) -> Any:
        size = self._head_rows
        first = ranges[0].start // size
        last = -(-ranges[0].stop // size)
        index = (slice(first * size, last * size), *ranges[1:])
        whole = self._source[index]
        pairs = whole.unflatten(0, (last - first, size // 2, 2))
        rows = pairs.transpose(1, 2).flatten(0, 2)
        return rows[ranges[0].start - first * size : ranges[0].stop - first * size]


class JoinedHeads(TensorView):
    """The product from latent values to the keys and values of heads, `kv_b_proj`, [H * (K + V),
    L]. The file has it in two: `keys` [H, L, K], for queries that go into the space of latent
    values, and `values` [H, V, L]."""

    def __init__(self, keys: TensorSource, values: TensorSource) -> None:
        super().__init__(keys)
        self._values = values
        heads, latent, key_dim = keys.get_shape()
        same_heads, value_dim, same_latent = values.get_shape()
        if (same_heads, same_latent) != (heads, latent):
            raise ValueError(
                f"has shape {keys.get_shape()}, which does not fit that of attn_v_b, "
                f"{values.get_shape()}"
            )
        self._shape = [heads * (key_dim + value_dim), latent]
        self._key_dim = key_dim
        self._head_rows = key_dim + value_dim

    def get_shape(self) -> list[int]:
        return self._shape

    def read(self, ranges: list[slice]) -> Any:
        rows, columns = ranges
        first = rows.start // self._head_rows
        heads = slice(first, -(-rows.stop // self._head_rows))
        keys = self._source[heads, columns]
        values = self._values[heads, :, columns]
        whole = values.new_empty(len(values), self._head_rows, values.shape[2])
        whole[:, : self._key_dim] = keys.transpose(1, 2)
        whole[:, self._key_dim :] = values
        before = first * self._head_rows
        return whole.flatten(0, 1)[rows.start - before : rows.stop - before]


class Shifted(TensorView):
    """Every element and `by`."""

    def __init__(self, source: TensorSource, *, by: float) -> None:
        super().__init__(source)
        self._by = by

    def get_shape(self) -> list[int]:
        return self._source.get_shape()

    def read(self, ranges: list[slice]) -> Any:
        return self._source[tuple(ranges)] + self._by


class AsRow(TensorView):
    """A vector as a matrix of one row."""

    def get_shape(self) -> list[int]:
        return [1, *self._source.get_shape()]

    def read(self, ranges: list[slice]) -> Any:
        return self._source[ranges[1]][None][ranges[0]]


@dataclass(frozen=True, slots=True)
class SplitHeadPairs:
    """The rows of `heads` heads that the converter has paired for its RoPE; see SplitPairs."""

    pattern: str
    heads: int

    def apply(self, name: str, source: TensorSource) -> Iterator[Named]:
        """Rule.apply."""
        if re.search(self.pattern, name) is None:
            yield name, source
            return
        rows = source.get_shape()[0]
        if rows % (2 * self.heads):
            raise ValueError(f"has {rows} rows, expected a multiple of {2 * self.heads}")
        yield name, SplitPairs(source, heads=self.heads)


@dataclass(frozen=True, slots=True)
class Shift:
    """Tensors to whose elements the converter has added `-by`."""

    pattern: str
    by: float

    def apply(self, name: str, source: TensorSource) -> Iterator[Named]:
        """Rule.apply."""
        is_meant = re.search(self.pattern, name) is not None
        yield name, Shifted(source, by=self.by) if is_meant else source


@dataclass(frozen=True, slots=True)
class Row:
    """Matrices of one row that files hold as vectors."""

    pattern: str

    def apply(self, name: str, source: TensorSource) -> Iterator[Named]:
        """Rule.apply."""
        is_vector = re.search(self.pattern, name) is not None and len(source.get_shape()) == 1
        yield name, AsRow(source) if is_vector else source
