"""Integer codes of a checkpoint, packed as they are by the kernel wheel."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import ops
from ..errors import ConfigError
from .base import LinearMethod
from .config import Target, require_kernel
from .dense import DenseMethod, padded_bytes
from .params import Block, LinearShape
from .storage import Storage, StorageMethod, check_finite

_GROUPS = (128, 64, 32)  # of `ops.pack_weight`, the cheapest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """The arguments of `ops.pack_weight`. w: int8 [N, K], or uint8 [N, ceil(K / 2)] of 4-bit codes;
    scales [N, groups]; zeros: uint8 [N, groups], None where all are 8. `order`: the input that each
    column of w is of, int64 [K]; None: in order."""

    w: torch.Tensor
    scales: torch.Tensor
    kind: str
    zeros: torch.Tensor | None
    group: int
    order: torch.Tensor | None = None


class CodesStorage(Storage):
    """Integer codes with scales. `quantizes_x`: the checkpoint is meant for x in 8 bits too, with a
    scale for each token."""

    quantizes_x: bool = False

    @property
    def dropped(self) -> tuple[str, ...]:
        """The parameters of which nothing is held beside the packed codes."""
        return ()

    @property
    @abstractmethod
    def kind(self) -> str:
        """The kind of `ops.pack_weight` that holds the codes: int8 or int4; where x is quantized
        too, w8a8."""

    def check_cut(self, shape: LinearShape) -> None:
        """Raises ConfigError where a rank's share begins or ends inside of a word or group."""
        for part in shape.parts.values():
            if not part.is_cut_at(self.output_unit):
                raise _wrong_cut(shape, part, "outputs", self.output_unit)
        if not shape.inputs.is_cut_at(self.input_unit):
            raise _wrong_cut(shape, shape.inputs, "inputs", self.input_unit)

    @abstractmethod
    def codes(self, layer: Any) -> Codes:
        """The loaded parameters as `ops.pack_weight` takes them. Raises ValueError for values that
        it does not."""


class CodesMethod(StorageMethod, DenseMethod):
    """Multiplies by the codes of the checkpoint, every one of which is kept."""

    storage: CodesStorage
    packs_experts = True

    def __init__(self, storage: CodesStorage) -> None:
        super().__init__(storage)
        self.kind = storage.kind

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        """As in the checkpoint, with its scales of 16 bits, which are read as float32, and padded.
        Within some 5 % in groups of 32, else closer: which type the scales are held in, and
        whether there are zero points, which take a byte each then, their values say."""
        size = 0
        for spec in self.storage.params(shape):
            if spec.name in self.storage.dropped:
                continue
            is_scale = spec.dtype == torch.float32
            width = 2 if is_scale else spec.dtype.itemsize
            size += math.prod(spec.shape_on_rank(shape)) * width
        return padded_bytes(size, shape)

    def finalize(self, layer: Any) -> None:
        try:
            codes = self.storage.codes(layer)
            weight = self._packed(codes, layer.compute_dtype)
        except NotImplementedError as error:  # what the wheel does not take
            raise ValueError(f"cannot be held: {error}") from None
        if codes.order is None:
            layer.hold(weight=weight)
        else:
            layer.hold(weight=weight, order=codes.order)

    def _packed(self, codes: Codes, dtype: torch.dtype) -> ops.PackedWeight:
        check_finite(codes.scales)
        return ops.pack_weight(
            codes.w,
            codes.scales,
            self.kind,
            zeros=codes.zeros,
            group=codes.group,
            dtype=dtype,
        )


def codes_method(storage: CodesStorage, target: Target) -> LinearMethod:
    """What multiplies integer codes on this target. Raises ConfigError where nothing does."""
    require_kernel(target, f"{storage.title} of checkpoints", storage.kind)
    return CodesMethod(storage)


def from_arguments(found: ops.PackArguments) -> Codes:
    """What a function of the wheel has unpacked."""
    return Codes(
        w=found["w"],
        scales=compact(found["scales"]),
        kind=found["kind"],
        zeros=found["zeros"],
        group=found["group"],
    )


def _wrong_cut(shape: LinearShape, block: Block, what: str, unit: int) -> ConfigError:
    return ConfigError(
        f"{shape.name}: {block.size} of {block.total} {what} on a rank are no whole groups of "
        f"{unit}; a smaller --tp-size cuts it less"
    )


def regrouped(codes: Codes, in_features: int) -> Codes:
    """With groups of a size that `ops.pack_weight` has: larger ones share their scale. Raises
    ValueError for a group size of which that is none."""
    if codes.group in _GROUPS or (codes.group == 0 and codes.kind == "int8"):
        return codes
    size = codes.group or -(-in_features // _GROUPS[0]) * _GROUPS[0]
    fitting = [group for group in _GROUPS if size % group == 0]
    if not fitting:
        raise ValueError(f"has groups of {size} inputs, supported are multiples of 32")
    group = fitting[0]
    count = -(-in_features // group)

    def spread(by_group: torch.Tensor) -> torch.Tensor:
        return by_group.repeat_interleave(size // group, 1)[:, :count].contiguous()

    zeros = None if codes.zeros is None else spread(codes.zeros)
    return replace(codes, scales=spread(codes.scales), zeros=zeros, group=group)


def cut_unit(size: int) -> int:
    """Where groups of `size` inputs can be cut: at the smallest group that shares a scale in
    `ops.pack_weight`."""
    return _GROUPS[-1] if size % _GROUPS[-1] == 0 else size


def groups_on_rank(inputs: Block, size: int) -> tuple[int, torch.Tensor]:
    """Groups of which a rank's inputs are whole ones: their size, `size` or a part of it, and in
    which of the checkpoint's groups that the rank has loaded each of them lies."""
    part = size
    if not inputs.is_cut_at(size):
        fitting = [g for g in _GROUPS if not (size % g or inputs.first % g or inputs.size % g)]
        part = fitting[0]
    starts = torch.arange(inputs.first, inputs.first + inputs.size, part)
    return part, starts // size - inputs.first // size


def reordered(codes: Codes, groups: torch.Tensor, size: int) -> Codes:
    """Codes whose inputs stand in the order of their groups: `groups` [K] are those of the inputs
    as they stand now, of `size` inputs each. Raises ValueError where they are of other sizes."""
    k = len(groups)
    order = torch.argsort(groups, stable=True)
    expected = torch.arange(k, device=groups.device) // size
    if not torch.equal(groups[order].long(), expected):
        raise ValueError(f"has groups that are not of {size} inputs each")
    if codes.kind == "int8":
        return replace(codes, w=codes.w[:, order].contiguous(), order=order)
    values = torch.stack((codes.w & 15, codes.w >> 4), dim=-1).flatten(1)[:, order]
    return replace(codes, w=pairs(values), order=order)


def pairs(values: torch.Tensor) -> torch.Tensor:
    """4-bit codes, uint8 [N, K] of an even K, two to a byte, the first in the low half."""
    return (values[:, ::2] | values[:, 1::2] << 4).contiguous()


def compact(scales: torch.Tensor) -> torch.Tensor:
    """float32 scales in the smallest type that holds them exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        small = scales.to(dtype)
        if torch.equal(small.float(), scales):
            return small
    return scales
