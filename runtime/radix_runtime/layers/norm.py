"""RMSNorm."""

import torch

from .. import ops
from ..quantization.base import meta_parameter
from .base import BuildContext, Layer


class RMSNorm(Layer):
    def __init__(self, ctx: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        self.weight = meta_parameter(size, dtype=ctx.dtype)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size]; the result is a new tensor."""
        return ops.rmsnorm(x, self.weight, self.eps)
