"""Norms: of the hidden state, of each head, and of all heads together."""

import torch
from torch import nn

from .. import ops, specs
from ..families.tensor_views import TensorSource
from ..quantization.base import meta_parameter
from ..quantization.params import Block, Part
from .base import BuildContext, Fusible, Layer, check_shape


class RMSNorm(Layer, Fusible):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension. `unit_offset`: the
    checkpoint holds weight - 1; the sum is kept in float32."""

    fusible = True

    def __init__(
        self, ctx: BuildContext, size: int, *, eps: float, unit_offset: bool = False
    ) -> None:
        super().__init__()
        self.weight = meta_parameter(size, dtype=ctx.dtype)
        self.eps = eps
        self._unit_offset = unit_offset

    def finalize(self, name: str) -> None:
        if self._unit_offset:
            self.weight = nn.Parameter(self.weight.data.float() + 1, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size]; the result is a new tensor."""
        return ops.rmsnorm(x, self.weight, self.eps)


class LayerNorm(Layer):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension."""

    special_ops = ("layernorm",)

    def __init__(self, ctx: BuildContext, size: int, *, eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = meta_parameter(size, dtype=ctx.dtype)
        self.bias = meta_parameter(size, dtype=ctx.dtype) if bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size]; the result is a new tensor."""
        return ops.layernorm(x, self.weight, self.bias, self.eps)


def build_norm(ctx: BuildContext, spec: specs.Norm, size: int) -> RMSNorm | LayerNorm:
    """The norm that `spec` describes, of `size` elements."""
    if isinstance(spec, specs.LayerNorm):
        return LayerNorm(ctx, size, eps=spec.eps, bias=spec.bias)
    return RMSNorm(ctx, size, eps=spec.eps, unit_offset=spec.unit_offset)


class HeadNormWeight(Layer):
    """The weight of an RMSNorm over each head of q or k, which runs inside of
    `ops.fused_qk_norm_rope_store`. Once loaded it is float32, which that op takes for a cache of
    any type. `unit_offset`: the checkpoint holds weight - 1."""

    def __init__(self, ctx: BuildContext, head_dim: int, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = meta_parameter(head_dim, dtype=ctx.dtype)
        self._unit_offset = unit_offset

    def finalize(self, name: str) -> None:
        weight = self.weight.data.float()
        if self._unit_offset:
            weight = weight + 1
        self.weight = nn.Parameter(weight, requires_grad=False)


class AllHeadsRMSNorm(Layer):
    """An RMSNorm over all heads of q, or of k, together, of which this rank has `block`. Where
    ranks repeat KV heads, they all do so equally often, and the mean is the same."""

    def __init__(self, ctx: BuildContext, block: Block, *, eps: float) -> None:
        super().__init__()
        self.weight = meta_parameter(block.size, dtype=ctx.dtype)
        self.eps = eps
        self._block = block
        self._communicator = ctx.communicator

    def check_source(self, name: str, source: TensorSource, part: Part) -> None:
        check_shape(source, (self._block.total,))

    def weight_loader(
        self, name: str, param: torch.Tensor, source: TensorSource, part: Part
    ) -> None:
        block = self._block
        self.check_source(name, source, part)
        param.copy_(source[block.first : block.first + block.size])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, this rank's elements]; the result is a new tensor."""
        ranks = self._communicator.world_size
        if ranks == 1:
            return ops.rmsnorm(x, self.weight, self.eps)
        wide = x.float()
        squares = self._communicator.all_reduce(wide.square().mean(-1, keepdim=True))
        scale = (squares / ranks + self.eps).rsqrt()
        return (wide * scale * self.weight.float()).to(x.dtype)
