"""Weights in the compute type: packed by the kernel wheel on the CPU, plain on a GPU."""

from typing import Any

import torch

from .. import ops
from .base import LinearMethod, meta_parameter


class DenseMethod(LinearMethod):
    """`layer.weight` is a [out, in] parameter until finalize; on the CPU the packed weight takes its place there."""

    def create(self, layer: Any, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        layer.weight = meta_parameter(out_features, in_features, dtype=dtype)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return ops.linear(x, layer.weight, bias)

    def finalize(self, layer: Any, name: str) -> None:
        if name == "weight" and layer.weight.device.type == "cpu":
            source = layer.weight.data
            del layer.weight
            layer.weight = ops.pack_weight(source)
