"""RMSNorm, of the hidden state and of each head."""

import torch
from torch import nn

from .. import ops
from ..quantization.base import meta_parameter
from .base import BuildContext, Fusible, Layer


class RMSNorm(Layer, Fusible):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    fusible = True

    def __init__(self, ctx: BuildContext, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = meta_parameter(size, dtype=ctx.dtype)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size]; the result is a new tensor."""
        return ops.rmsnorm(x, self.weight, self.eps)


class HeadNormWeight(Layer):
    """The weight of an RMSNorm over each head of q or k, which runs inside of
    `ops.fused_qk_norm_rope_store`. Once loaded it is float32, which that op takes for a cache of
    any type."""

    def __init__(self, ctx: BuildContext, head_dim: int) -> None:
        super().__init__()
        self.weight = meta_parameter(head_dim, dtype=ctx.dtype)

    def finalize(self, name: str) -> None:
        self.weight = nn.Parameter(self.weight.data.float(), requires_grad=False)
