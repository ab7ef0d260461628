"""Weights in the compute type: packed by the kernel wheel on the CPU, plain on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import ops
from .base import LinearMethod

Weight = ops.PackedWeight | torch.Tensor


class DenseMethod(LinearMethod):
    """`layer.weight` is a [out, in] parameter until finalize; on the CPU it is dropped there and `layer.packed` takes
    its place."""

    def create(self, layer: Any, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        shape = (out_features, in_features)
        weight = torch.empty(shape, dtype=dtype, device="meta")
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        layer.packed = None

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return ops.linear(x, weight_of(layer), bias)

    def finalize(self, layer: Any, name: str) -> None:
        if name == "weight" and layer.weight.device.type == "cpu":
            layer.packed = ops.pack_weight(layer.weight.data)
            layer.weight = None


def weight_of(layer: Any) -> Weight:
    """The weight of a layer in the form that ops.linear and ops.embedding take."""
    return layer.weight if layer.packed is None else layer.packed
