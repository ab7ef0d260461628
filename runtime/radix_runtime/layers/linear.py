"""Linear layers and how tensor parallelism cuts them.

ColumnParallelLinear   outputs are split; several checkpoint tensors may be merged in one
QKVLinear              column parallel by heads; KV heads repeat where ranks outnumber them
RowParallelLinear      inputs are split; the partial sums are reduced over the ranks"""

from typing import NamedTuple

import torch

from ..quantization.base import meta_parameter
from .base import BuildContext, Layer, Part, TensorSource, check_shape


class _Block(NamedTuple):
    """Rows [first, first + size) of a checkpoint tensor with `total` rows."""

    total: int
    first: int
    size: int


# This rank's of `total` rows, which must be a multiple of the number of ranks.
def _share(ctx: BuildContext, total: int) -> _Block:
    size = total // ctx.communicator.world_size
    return _Block(total, ctx.communicator.rank * size, size)


class _Linear(Layer):
    """y = x W^T + b with the rows of W (and b) made of blocks, one for each part, in order."""

    def __init__(
        self, ctx: BuildContext, in_features: int, blocks: dict[Part, _Block], bias: bool
    ) -> None:
        super().__init__()
        self.method, self._communicator, self._blocks = ctx.linear_method, ctx.communicator, blocks
        self.sizes = [block.size for block in blocks.values()]
        self.method.create(self, in_features, sum(self.sizes), ctx.dtype)
        self.bias = meta_parameter(sum(self.sizes), dtype=ctx.dtype) if bias else None

    def parts(self, name: str) -> tuple[Part, ...]:
        return tuple(self._blocks)

    def weight_loader(self, param: torch.Tensor, source: TensorSource, part: Part) -> None:
        total, first, size = self._blocks[part]
        check_shape(source, (total, *param.shape[1:]))
        dict(zip(self._blocks, param.split(self.sizes), strict=True))[part].copy_(
            source[first : first + size]
        )

    def finalize(self, name: str) -> None:
        self.method.finalize(self, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x, self.bias)


class ColumnParallelLinear(_Linear):
    def __init__(
        self, ctx: BuildContext, in_features: int, outputs: dict[str, int], *, bias: bool = False
    ) -> None:
        super().__init__(
            ctx, in_features, {part: _share(ctx, total) for part, total in outputs.items()}, bias
        )


class QKVLinear(_Linear):
    """Outputs of a rank: its query heads, then its key heads, then its value heads."""

    def __init__(
        self,
        ctx: BuildContext,
        in_features: int,
        dim: int,
        heads: int,
        kv_heads: int,
        *,
        bias: bool,
    ) -> None:
        ranks = ctx.communicator.world_size
        self_kv, first_kv = max(1, kv_heads // ranks), ctx.communicator.rank * kv_heads // ranks
        kv = _Block(kv_heads * dim, first_kv * dim, self_kv * dim)
        super().__init__(
            ctx, in_features, {"q_proj": _share(ctx, heads * dim), "k_proj": kv, "v_proj": kv}, bias
        )
        self.num_heads, self.num_kv_heads = heads // ranks, self_kv


class RowParallelLinear(_Linear):
    """`in_features` must be a multiple of the number of ranks. Rank 0 adds the bias and the
    residual, once."""

    def __init__(
        self, ctx: BuildContext, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        share = in_features // ctx.communicator.world_size
        super().__init__(ctx, share, {None: _Block(out_features, 0, out_features)}, bias)

    def weight_loader(self, param: torch.Tensor, source: TensorSource, part: Part) -> None:
        if param.dim() == 1:
            return super().weight_loader(param, source, part)
        rows, width = param.shape
        check_shape(source, (rows, width * self._communicator.world_size))
        first = self._communicator.rank * width
        param.copy_(source[:, first : first + width])

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The product, added to residual [T, out_features], whose memory may be taken for the
        result."""
        added = {"bias": self.bias, "residual": residual} if self._communicator.rank == 0 else {}
        return self._communicator.all_reduce(self.method.apply(self, x, **added))
