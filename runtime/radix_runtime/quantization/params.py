"""ParamSpec: how a parameter of a linear layer follows from the layer's outputs and inputs.

A method says of each of its parameters what an element stands for: one output, 128 of them, eight
inputs in a word. What a rank reads of a checkpoint's tensors, how those of several layers merge in
one parameter, and what shapes they must have all follow from that, here and nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ..families.tensor_views import TensorSource

# One of the checkpoint tensors that are merged into a parameter: the name of the module that it
# belongs to in the checkpoint, a sibling of ours; None: the parameter's own module.
Part = str | None

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# What may stand for one: powers of two, in files and in torch from 2.7 on.
_NUMBERS = (*_FLOATS, getattr(torch, "float8_e8m0fnu", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """[first, first + size) of `total` outputs or inputs of a layer of the checkpoint: a rank's.
    What lies past `total` is padding."""

    total: int
    first: int
    size: int

    @classmethod
    def whole(cls, total: int) -> "Block":
        """All of them."""
        return cls(total=total, first=0, size=total)

    @classmethod
    def share(cls, total: int, rank: int, ranks: int) -> "Block":
        """A rank's equal part of `total`, a multiple of the number of ranks."""
        size = total // ranks
        return cls(total=total, first=rank * size, size=size)

    def units(self, per: int) -> "Block":
        """The groups of `per` in which it lies, each of which it may share with its neighbours."""
        first = self.first // per
        end = -(-(self.first + self.size) // per)
        return Block(total=-(-self.total // per), first=first, size=end - first)

    def is_cut_at(self, per: int) -> bool:
        """Whether it begins and ends at borders of groups of `per`, or with the last of them."""
        ends_whole = (self.first + self.size) % per == 0
        return self.first % per == 0 and (ends_whole or self.first + self.size >= self.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """The outputs and inputs of a linear layer on this rank. `parts`: the outputs of each of the
    checkpoint's layers that it merges, in order. `name`: its path in the model, for messages."""

    name: str
    inputs: Block
    parts: Mapping[Part, Block]

    @property
    def in_features(self) -> int:
        """The inputs of this rank."""
        return self.inputs.size

    @property
    def out_features(self) -> int:
        """The outputs of this rank, of all parts."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """The outputs of this rank, by part."""
        return [block.size for block in self.parts.values()]


class Dim(Protocol):
    """What the elements along one dimension of a parameter stand for."""

    @property
    def is_merged(self) -> bool:
        """Whether merged parts lie one after the other along it."""
        ...

    @property
    def is_in_file(self) -> bool:
        """Whether a part's tensor has this dimension too."""
        ...

    def block(self, inputs: Block, outputs: Block) -> Block:
        """The elements that this rank needs of a part's tensor, of all that it has."""
        ...


@dataclass(frozen=True, slots=True)
class Outputs:
    """An element for each `per` outputs: 1, those of a block that share a scale, or those packed in
    a word."""

    per: int = 1
    is_merged: bool = True
    is_in_file: bool = True

    def block(self, inputs: Block, outputs: Block) -> Block:
        """Dim.block."""
        return outputs.units(self.per)


@dataclass(frozen=True, slots=True)
class Inputs:
    """`width` elements for each `per` inputs."""

    per: int = 1
    width: int = 1
    is_merged: bool = False
    is_in_file: bool = True

    def block(self, inputs: Block, outputs: Block) -> Block:
        """Dim.block."""
        units = inputs.units(self.per)
        width = self.width
        return Block(total=units.total * width, first=units.first * width, size=units.size * width)


@dataclass(frozen=True, slots=True)
class Fixed:
    """`size` elements, of which every rank needs all."""

    size: int
    is_merged: bool = False
    is_in_file: bool = True

    def block(self, inputs: Block, outputs: Block) -> Block:
        """Dim.block."""
        return Block.whole(self.size)


@dataclass(frozen=True, slots=True)
class EachPart:
    """An element for each part: of scales of whole tensors, say. A part's tensor has not this
    dimension; a scale may be of the shape [] or [1] there."""

    is_merged: bool = True
    is_in_file: bool = False

    def block(self, inputs: Block, outputs: Block) -> Block:
        """Dim.block."""
        return Block.whole(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A parameter that a checkpoint fills.

    `name`: the attribute of the layer. `suffix`: its name in the checkpoint, behind that of the
    layer; as `name` by default. `dims`: what its elements stand for. `parts`: those of the layer's
    parts that it holds; all of them by default."""

    name: str
    dims: tuple[Dim, ...]
    dtype: torch.dtype
    suffix: str = ""
    parts: tuple[Part, ...] | None = None

    def parts_of(self, shape: LinearShape) -> tuple[Part, ...]:
        """The parts of a layer that it is merged from."""
        return tuple(shape.parts) if self.parts is None else self.parts

    def shape_on_rank(self, shape: LinearShape) -> tuple[int, ...]:
        """Its sizes on this rank."""
        sizes = []
        for dim in self.dims:
            blocks = [dim.block(shape.inputs, shape.parts[part]) for part in self.parts_of(shape)]
            merged = sum(block.size for block in blocks)
            sizes.append(merged if dim.is_merged else blocks[0].size)
        return tuple(sizes)

    def check_part(self, shape: LinearShape, found: list[int], part: Part) -> None:
        """Raises ValueError unless a part's tensor of the checkpoint has the right sizes."""
        expected = [block.total for block in self._blocks(shape, part)]
        is_scalar = not expected and found == [1]
        if found != expected and not is_scalar:
            raise ValueError(f"has shape {found}, expected {expected}")

    def check_dtype(self, found: torch.dtype) -> None:
        """Raises ValueError unless numbers come for numbers, which are converted, and codes of its
        own type for codes."""
        is_number = found in _NUMBERS
        if found != self.dtype and not (is_number and self.dtype in _FLOATS):
            raise ValueError(f"holds {_name(found)}, expected {_name(self.dtype)}")

    def load_part(
        self, shape: LinearShape, param: torch.Tensor, source: TensorSource, part: Part
    ) -> None:
        """Copies what this rank needs of a part's tensor to its place in `param`, which has
        `shape_on_rank`; what lies past the tensor's end is 0. Raises ValueError on an unexpected
        shape or type."""
        found = source.get_shape()
        self.check_part(shape, found, part)
        target = self.place(shape, param, part)
        index = []
        axes = [axis for axis, dim in enumerate(self.dims) if dim.is_in_file]
        for axis, block in zip(axes, self._blocks(shape, part), strict=True):
            end = min(block.first + block.size, block.total)
            count = max(0, end - block.first)
            if count < block.size:
                target.narrow(axis, count, block.size - count).zero_()
                target = target.narrow(axis, 0, count)
            index.append(slice(min(block.first, end), end))
        if target.numel() > 0:
            piece = source[tuple(index) if index else ...]
            target.copy_(self._typed(piece).view(target.shape))

    def lies_in_files(self, shape: LinearShape) -> bool:
        """Whether the parameter is what this rank needs of its parts' tensors, one under the other
        where there are several."""
        if not all(dim.is_in_file for dim in self.dims):
            return False
        parts = self.parts_of(shape)
        merged = [axis for axis, dim in enumerate(self.dims) if dim.is_merged]
        if len(parts) > 1 and merged != [0]:
            return False
        blocks = [block for part in parts for block in self._blocks(shape, part)]
        return all(block.first + block.size <= block.total for block in blocks)

    def part_in_place(self, shape: LinearShape, source: TensorSource, part: Part) -> torch.Tensor:
        """What this rank needs of a part's tensor of a parameter that `lies_in_files`, as it lies
        there, in the file's type. Raises ValueError on an unexpected shape or type."""
        self.check_part(shape, source.get_shape(), part)
        blocks = self._blocks(shape, part)
        piece = source[tuple(slice(block.first, block.first + block.size) for block in blocks)]
        return self._typed(piece)

    def place(self, shape: LinearShape, param: torch.Tensor, part: Part) -> torch.Tensor:
        """The view of a merged parameter that holds one part."""
        view = param
        for axis, dim in enumerate(self.dims):
            if not dim.is_merged:
                continue
            before = 0
            for other in self.parts_of(shape):
                size = dim.block(shape.inputs, shape.parts[other]).size
                if other == part:
                    view = view.narrow(axis, before, size)
                    break
                before += size
        return view

    def _blocks(self, shape: LinearShape, part: Part) -> list[Block]:
        """What this rank needs along each dimension of a part's tensor."""
        outputs = shape.parts[part]
        return [dim.block(shape.inputs, outputs) for dim in self.dims if dim.is_in_file]

    def _typed(self, piece: torch.Tensor) -> torch.Tensor:
        self.check_dtype(piece.dtype)
        return piece


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
