"""The tensors of a GGUF file: floats as they are, codes widened or unpacked as they are read."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .. import ops
from ..errors import ConfigError
from ..families.tensor_views import TensorSource, TensorView
from ..gguf import GgufFile, TensorEntry
from ..gguf.views import JoinedHeads

_PIECE = 1 << 22  # elements that are worked on at a time
_KEY_PART = ".attn_k_b.weight"
_VALUE_PART = ".attn_v_b.weight"
_WHOLE = ".attn_kv_b.weight"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def gguf_tensors(file: GgufFile, dtype: torch.dtype) -> Iterator[tuple[str, TensorSource]]:
    """The file's tensors by its names; quantized ones are widened to `dtype` where they are read.
    The two parts of latent attention's `attn_kv_b` come as one, under that name. Raises
    ConfigError where they do not belong together."""
    for name, entry in file.tensors.items():
        tensor = GgufTensor(file, entry=entry, dtype=dtype)
        if name.endswith(_KEY_PART):
            whole = name.removesuffix(_KEY_PART) + _WHOLE
            yield whole, _joined(file, name, keys=tensor, dtype=dtype)
        elif not name.endswith(_VALUE_PART):
            yield name, tensor


def _joined(file: GgufFile, name: str, *, keys: TensorSource, dtype: torch.dtype) -> TensorSource:
    other = name.removesuffix(_KEY_PART) + _VALUE_PART
    if other not in file.tensors:
        raise ConfigError(f"{file.path}: tensor {other!r} is missing")
    values = GgufTensor(file, entry=file.tensors[other], dtype=dtype)
    if len(keys.get_shape()) != 3 or len(values.get_shape()) != 3:
        raise ConfigError(f"{file.path}: {name} and {other} must have three dimensions")
    try:
        return JoinedHeads(keys, values)
    except ValueError as error:
        raise ConfigError(f"{file.path}: {name} {error}") from None


class GgufTensor(TensorView):
    """A tensor of the file. What is not indexed is not read, but for the rest of a row.

    `kind`: the name of its type."""

    def __init__(self, file: GgufFile, entry: TensorEntry, dtype: torch.dtype) -> None:
        self._blocks = file.blocks(entry)
        self._entry = entry
        self._dtype = dtype
        self.kind = entry.type.name

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def read(self, ranges: list[slice]) -> torch.Tensor:
        *outer, columns = ranges
        blocks = self.blocks(outer)
        if self.kind in _FLOATS:
            # Copied, because the file's memory cannot be written to.
            whole = torch.from_numpy(np.array(blocks)).view(_FLOATS[self.kind])
        else:
            rows = blocks.reshape(-1, blocks.shape[-1])
            whole = torch.empty(len(rows), self._entry.shape[-1], dtype=self._dtype)
            for piece in self.pieces(len(rows)):
                whole[piece] = ops.dequantize_gguf(rows[piece], self.kind)
            whole = whole.view(*blocks.shape[:-1], -1)
        return whole[..., columns]

    def blocks(self, outer: list[slice]) -> Any:
        """The blocks of what all dimensions but the last are cut to: uint8, whole rows."""
        return self._blocks[tuple(outer)]

    def pieces(self, rows: int) -> Iterator[slice]:
        """So many rows in pieces, so that what is made of them meanwhile stays small."""
        step = max(1, _PIECE // self._entry.shape[-1])
        for first in range(0, rows, step):
            yield slice(first, min(first + step, rows))


class UnpackedTensor:
    """The codes of a quantized tensor and what they are multiplied by, each a TensorSource of its
    own by name (`sources`). The rows that were read last are kept until all of them are read."""

    def __init__(self, tensor: GgufTensor, unpack: Any, widths: Mapping[str, int]) -> None:
        self._tensor = tensor
        self._unpack = unpack
        self._rows: list[slice] = []
        self._parts: dict[str, torch.Tensor] = {}
        *self.outer, inputs = tensor.get_shape()
        self.sources = {
            name: _Part(self, name=name, width=inputs // per) for name, per in widths.items()
        }

    def read(self, name: str, outer: list[slice]) -> torch.Tensor:
        """One of the parts, of whole rows."""
        if name not in self._parts or outer != self._rows:
            self._rows = outer
            self._parts = self._read_rows(outer)
        return self._parts.pop(name)

    def _read_rows(self, outer: list[slice]) -> dict[str, torch.Tensor]:
        blocks = self._tensor.blocks(outer)
        rows = blocks.reshape(-1, blocks.shape[-1])
        whole: dict[str, torch.Tensor] = {}
        for piece in self._tensor.pieces(len(rows)):
            for name, values in self._unpack(rows[piece], self._tensor.kind).items():
                if name not in whole:
                    whole[name] = values.new_empty(len(rows), values.shape[1])
                whole[name][piece] = values
        return {name: values.view(*blocks.shape[:-1], -1) for name, values in whole.items()}


class _Part(TensorView):
    """One part of an UnpackedTensor, `width` elements a row."""

    def __init__(self, tensor: UnpackedTensor, name: str, width: int) -> None:
        self._tensor = tensor
        self._name = name
        self._width = width

    def get_shape(self) -> list[int]:
        return [*self._tensor.outer, self._width]

    def read(self, ranges: list[slice]) -> torch.Tensor:
        *outer, columns = ranges
        return self._tensor.read(self._name, outer)[..., columns]
