"""LinearMethod: how the weight of a linear layer is held and multiplied. One file a format."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from .. import ops
from ..shortcuts import reset_shortcuts


class LinearMethod(ABC):
    """Owns the parameters of a linear layer other than the bias; the layer slices checkpoint
    tensors for its rank and merges them. One instance serves all layers of a model; `layer` is
    always the module that the parameters are attributes of.

    The methods with a body are `apply` by other ways. A subclass that overrides `apply` does not
    inherit those that its base class wrote for its own `apply`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        shortcuts = ("apply_silu_and_mul", "argmax", "packed_weight")
        reset_shortcuts(cls, LinearMethod, "apply", shortcuts)

    @abstractmethod
    def create(self, layer: Any, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        """Registers the parameters on `layer`, on the meta device: this rank's sizes, of outputs
        first; `dtype` is the model's compute type."""

    @abstractmethod
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
        """x [T, in_features] -> x W^T + bias + residual, [T, out_features], rounded once.

        bias: [out_features]. residual: [T, out_features] of x's dtype. out_dtype: x's dtype by
        default, or float32. The memory of `out`, which has the result's shape and dtype, or else
        that of `residual` may become the result."""

    @abstractmethod
    def finalize(self, layer: Any, name: str) -> None:
        """Called once, when parameter `name` is loaded completely: repack it, free the source.
        Raises ValueError when its values cannot be held in this format, ConfigError when the device
        cannot use it."""

    def apply_silu_and_mul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, where gate and up are the two halves of the outputs: [T, in_features] ->
        [T, out_features / 2]. A kernel may do it in one pass, rounding once."""
        return ops.silu_and_mul(self.apply(layer, x))

    def argmax(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """The index of the largest output of each row, int32 [T], -1 where none is finite, without
        writing the outputs; None where no kernel can."""
        weight = self.packed_weight(layer)
        return None if weight is None else ops.linear_argmax(x, weight)[0]

    def packed_weight(self, layer: Any) -> ops.PackedWeight | None:
        """The loaded weight, where `apply` is `ops.linear` by it and nothing more, so that a kernel
        may read it directly; None otherwise."""
        return None

    def for_head(self) -> "LinearMethod | None":
        """The method of the vocabulary matrix, as a head or tied; None: dense."""
        return None


def meta_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without memory; the loader gives it some."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
