"""Linear layers and how tensor parallelism cuts them.

ReplicatedLinear       every rank has all of it
ColumnParallelLinear   outputs are split; several checkpoint tensors may be merged in one
QKVLinear              column parallel by heads; KV heads repeat where ranks outnumber them
RowParallelLinear      inputs are split; the partial sums are reduced over the ranks
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import BuildContext, Layer, Part, TensorSource, check_shape, meta_parameter


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows [first, first + count) of a checkpoint tensor with `total` rows, which go to rows
    [offset, offset + count) of the merged parameter."""

    total: int
    first: int
    count: int
    offset: int


class _Linear(Layer):
    """y = x W^T + b with the rows of W (and b) made of blocks, one for each part."""

    def __init__(
        self, ctx: BuildContext, in_features: int, blocks: dict[Part, _Block], bias: bool
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.method = ctx.linear_method
        self._blocks = blocks
        out_features = sum(block.count for block in blocks.values())
        self.method.create(self, in_features, out_features, ctx.dtype)
        self.bias = meta_parameter(out_features, dtype=ctx.dtype) if bias else None

    def parts(self, name: str) -> tuple[Part, ...]:
        return tuple(self._blocks)

    def weight_loader(self, param: torch.Tensor, source: TensorSource, part: Part) -> None:
        block = self._blocks[part]
        check_shape(source, (block.total, *param.shape[1:]))
        rows = source[block.first : block.first + block.count]
        param[block.offset : block.offset + block.count].copy_(rows)

    def finalize(self, name: str) -> None:
        self.method.finalize(self, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x, self.bias)


class ReplicatedLinear(_Linear):
    def __init__(
        self, ctx: BuildContext, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        block = _Block(out_features, 0, out_features, 0)
        super().__init__(ctx, in_features, {None: block}, bias)


class ColumnParallelLinear(_Linear):
    """`out_features`: {part: outputs}; each must be a multiple of the number of ranks."""

    def __init__(
        self,
        ctx: BuildContext,
        in_features: int,
        out_features: dict[Part, int],
        *,
        bias: bool = False,
    ) -> None:
        blocks, offset = {}, 0
        for part, total in out_features.items():
            count = total // ctx.tp_size
            blocks[part] = _Block(total, ctx.rank * count, count, offset)
            offset += count
        super().__init__(ctx, in_features, blocks, bias)


class QKVLinear(_Linear):
    """Outputs of a rank: its query heads, then its key heads, then its value heads."""

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool = False,
    ) -> None:
        self_q = num_heads // ctx.tp_size
        self_kv = max(1, num_kv_heads // ctx.tp_size)
        first_kv = ctx.rank * num_kv_heads // ctx.tp_size
        q, kv = self_q * head_dim, self_kv * head_dim
        kv_total, kv_first = num_kv_heads * head_dim, first_kv * head_dim
        blocks: dict[Part, _Block] = {
            "q": _Block(num_heads * head_dim, ctx.rank * q, q, 0),
            "k": _Block(kv_total, kv_first, kv, q),
            "v": _Block(kv_total, kv_first, kv, q + kv),
        }
        super().__init__(ctx, hidden_size, blocks, bias)
        self.num_heads, self.num_kv_heads = self_q, self_kv
        self.sizes = (q, kv, kv)


class RowParallelLinear(_Linear):
    """`in_features` must be a multiple of the number of ranks. Rank 0 adds the bias, once."""

    def __init__(
        self, ctx: BuildContext, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        local = in_features // ctx.tp_size
        super().__init__(ctx, local, {None: _Block(out_features, 0, out_features, 0)}, bias)
        self._communicator = ctx.communicator
        self._columns = slice(ctx.rank * local, (ctx.rank + 1) * local)
        self._total = in_features

    def weight_loader(self, param: torch.Tensor, source: TensorSource, part: Part) -> None:
        if param.dim() == 1:
            super().weight_loader(param, source, part)
            return
        check_shape(source, (param.shape[0], self._total))
        param.copy_(source[:, self._columns])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self._communicator.rank == 0 else None
        out = self.method.apply(self, x, bias)
        return self._communicator.all_reduce(out)
