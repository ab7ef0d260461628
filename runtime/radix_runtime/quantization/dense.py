"""Weights in the compute type or quantized as they load, packed by the kernel wheel."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import ops
from ..shortcuts import reset_shortcuts
from .base import ExpertTerms, LinearMethod
from .params import Inputs, LinearShape, Outputs, ParamSpec

# What the CPU's wheel pads packed weights to, which narrow experts notice.
_OUTPUTS = 16
_INPUTS = 32
_INPUTS_OF_CODES = 64


class DenseMethod(LinearMethod):
    """`layer.weight` is an [out, in] parameter until finalize; then the packed weight takes its
    place, but for experts on a GPU in the compute type, which are stacked as they are. `kind` is
    that of `ops.pack_weight`; None: the compute type."""

    kind: str | None = None
    repacks = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        reset_shortcuts(cls, LinearMethod, "keep", ["repacks", "finalize_parts"])

    @property
    def is_divisible(self) -> bool:
        return self.kind is None and self.widens is None

    def params(self, shape: LinearShape, dtype: torch.dtype) -> Sequence[ParamSpec]:
        return [ParamSpec(name="weight", dims=(Outputs(), Inputs()), dtype=dtype)]

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        """As packed on the CPU; on a GPU odd sizes take a little less."""
        inputs = _padded(shape.in_features, _INPUTS)
        return _padded(shape.out_features, _OUTPUTS) * inputs * dtype.itemsize

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = residual
        return ops.linear(x, layer.weight, bias, residual=residual, out_dtype=out_dtype, out=out)

    def apply_silu_and_mul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return ops.linear_silu_and_mul(x, layer.weight)

    def packed_weight(self, layer: Any) -> ops.PackedWeight | None:
        weight = layer.weight
        if not isinstance(weight, ops.PackedWeight):
            return None
        # On a GPU no kernel reads more than `apply` does, but that of experts.
        return weight if weight.data.is_cpu or layer.is_stacked else None

    def plain_weight(self, layer: Any) -> torch.Tensor | None:
        weight = layer.weight
        if self.kind is not None or not isinstance(weight, ops.PackedWeight):
            return None
        rows: torch.Tensor | None = weight.rows
        return rows

    def finalize(self, layer: Any) -> None:
        self.keep(layer, layer.weight.data)

    def finalize_parts(self, layer: Any, parts: Sequence[torch.Tensor]) -> None:
        layer.hold(weight=ops.pack_merged(parts, kind=self.kind))

    def keep(self, layer: Any, weight: torch.Tensor) -> None:
        """The layer's weight is `weight` [out, in] from now on."""
        if weight.device.type == "cpu" or self.packs_experts or not layer.is_stacked:
            # Hopper's kernels fetch the first bytes of a packed weight before the kernel ahead of
            # them has ended: nothing in flight writes it.
            layer.hold(weight=ops.pack_weight(weight, kind=self.kind))
        else:
            layer.hold(weight=weight)

    def fused_experts(
        self,
        x: torch.Tensor,
        w1: Mapping[str, torch.Tensor],
        w2: Mapping[str, torch.Tensor],
        weights: torch.Tensor,
        ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        terms: ExpertTerms,
    ) -> torch.Tensor:
        return ops.fused_experts(
            x,
            w1["weight"],
            w2["weight"],
            weights,
            ids,
            bias1=terms.bias1,
            bias2=terms.bias2,
            activation=terms.activation,
            expert_map=expert_map,
        )


class PlainMethod(DenseMethod):
    """A weight that stays an [out, in] tensor on every device: an embedding that is no head too."""

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        return shape.out_features * shape.in_features * dtype.itemsize

    def keep(self, layer: Any, weight: torch.Tensor) -> None:
        layer.hold(weight=weight)

    def packed_weight(self, layer: Any) -> ops.PackedWeight | None:
        return None

    def plain_weight(self, layer: Any) -> torch.Tensor | None:
        return None


class Int8Method(DenseMethod):
    """8-bit weights with a scale for each output; with `quantizes_x` x in 8 bits too, with a scale
    for each token."""

    packs_experts = True

    def __init__(self, *, quantizes_x: bool = True) -> None:
        self.kind = "w8a8" if quantizes_x else "int8"

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        return packed_codes_bytes(shape, 0)


class Int4Method(DenseMethod):
    """4-bit weights with a scale for each 64 inputs; with `quantizes_x` x in 8 bits in the same
    groups."""

    packs_experts = True

    def __init__(self, *, quantizes_x: bool = True) -> None:
        self.kind = "w4a8" if quantizes_x else "int4"

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        groups = _padded(shape.in_features, _INPUTS_OF_CODES) // 64
        return _padded(shape.out_features, _OUTPUTS) * groups * (32 + 2)


def packed_codes_bytes(shape: LinearShape, group: int) -> int:
    """What a weight of 8-bit codes takes as the CPU's wheel packs it, with a float32 scale for each
    `group` inputs; 0: for each output."""
    inputs = _padded(shape.in_features, max(group, _INPUTS_OF_CODES))
    groups = inputs // group if group else 1
    return _padded(shape.out_features, _OUTPUTS) * (inputs + 4 * groups)


def padded_bytes(size: int, shape: LinearShape) -> int:
    """What `size` bytes of codes, and of what these are multiplied by, become as packed on the CPU:
    narrow shares of a rank are padded to whole tiles. Hopper's library pads outputs to 64, rows of
    codes for other GPUs have no padding to speak of."""
    outputs = _padded(shape.out_features, _OUTPUTS)
    inputs = _padded(shape.in_features, _INPUTS_OF_CODES)
    return size * outputs * inputs // (shape.out_features * shape.in_features)


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step
