"""LinearMethod: how the weight of a linear layer is held and multiplied. One file a format."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from .. import ops


class LinearMethod(ABC):
    """Owns a layer's parameters other than the bias; the layer slices checkpoints for its rank and
    merges parts."""

    @abstractmethod
    def create(self, layer: Any, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        """Registers the parameters (of this rank's sizes, on the meta device) on `layer`."""

    @abstractmethod
    def apply(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **ends: Any
    ) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features]. ends, as in `ops.linear`: out_dtype; out;
        residual, added before the result is rounded. The memory of both may become the result."""

    def apply_silu_and_mul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of the two halves of the outputs, which a kernel may do in one pass,
        rounding once."""
        return ops.silu_and_mul(self.apply(layer, x))

    @abstractmethod
    def finalize(self, layer: Any, name: str) -> None:
        """Called once when every part of parameter `name` is loaded: repack it, free the source."""

    def for_head(self) -> "LinearMethod | None":
        """The method of the vocabulary matrix, as a head or tied; None: dense."""
        return None


def meta_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without memory; the loader gives it some."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
