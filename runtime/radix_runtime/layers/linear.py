"""Linear layers and how tensor parallelism cuts them.

ReplicatedLinear       every rank has it whole
ColumnParallelLinear   outputs are split; several checkpoint tensors may be merged in one
QKVLinear              column parallel by heads; KV heads repeat where ranks outnumber them
RowParallelLinear      inputs are split; the partial sums are reduced over the ranks"""

from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ConfigError
from ..families.tensor_views import TensorSource
from ..quantization.base import meta_parameter
from .base import BuildContext, Fusible, Layer, Part, check_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows [first, first + size) of a checkpoint tensor that has `total` rows."""

    total: int
    first: int
    size: int


def _rank_share(ctx: BuildContext, total: int) -> Block:
    """This rank's part of `total` rows, which must be a multiple of the number of ranks."""
    size = total // ctx.communicator.world_size
    return Block(total=total, first=ctx.communicator.rank * size, size=size)


class WeightStack:
    """The weights of `count` linear layers of one shape in one tensor `data`, [count, out, in]."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.data: torch.Tensor | None = None

    def slot(self, index: int, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The memory of a weight of the shape and dtype of `like`, a view of the stack, which is
        allocated when it is first asked for."""
        if self.data is None:
            shape = (self._count, *like.shape)
            self.data = torch.empty(shape, dtype=like.dtype, device=device)
        return self.data[index]


class _Linear(Layer, Fusible):
    """y = x W^T + b. The rows of W (and b) are this rank's blocks of one or more checkpoint
    tensors, in the order of `blocks`; `sizes` are their outputs."""

    fusible = True

    def __init__(
        self, ctx: BuildContext, in_features: int, blocks: dict[Part, Block], *, bias: bool
    ) -> None:
        super().__init__()
        self.method = ctx.linear_method
        self.sizes = [block.size for block in blocks.values()]
        self._communicator = ctx.communicator
        self._blocks = blocks
        self._offsets: dict[Part, int] = {}
        out_features = 0
        for part, block in blocks.items():
            self._offsets[part] = out_features
            out_features += block.size
        self.method.create(self, in_features, out_features, ctx.dtype)
        self.bias = meta_parameter(out_features, dtype=ctx.dtype) if bias else None
        self._stack: WeightStack | None = None
        self._stack_index = 0

    def put_in(self, stack: WeightStack, index: int) -> None:
        """The weight's memory will be that of weight `index` of the stack. Raises ConfigError where
        the method holds no weight of that kind."""
        if not isinstance(getattr(self, "weight", None), nn.Parameter):
            raise ConfigError("this quantization format cannot hold experts on this device")
        self._stack = stack
        self._stack_index = index

    def block(self, part: Part) -> Block:
        """This rank's rows of a checkpoint tensor."""
        return self._blocks[part]

    def allocate(self, name: str, device: torch.device) -> torch.Tensor:
        if name == "weight" and self._stack is not None:
            return self._stack.slot(self._stack_index, self.get_parameter(name), device)
        return super().allocate(name, device)

    def parts(self, name: str) -> tuple[Part, ...]:
        return tuple(self._blocks)

    def weight_loader(self, param: torch.Tensor, source: TensorSource, part: Part) -> None:
        block = self._blocks[part]
        check_shape(source, (block.total, *param.shape[1:]))
        rows = source[block.first : block.first + block.size]
        param.narrow(0, self._offsets[part], block.size).copy_(rows)

    def finalize(self, name: str) -> None:
        self.method.finalize(self, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] -> [T, sum(sizes)]."""
        return self.method.apply(self, x, bias=self.bias)


class ReplicatedLinear(_Linear):
    """Every rank has all outputs."""

    def __init__(
        self, ctx: BuildContext, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        whole = Block(total=out_features, first=0, size=out_features)
        super().__init__(ctx, in_features, {None: whole}, bias=bias)


class ColumnParallelLinear(_Linear):
    """`outputs`: the checkpoint's names of the merged layers and their outputs of all ranks, each a
    multiple of the number of ranks."""

    def __init__(
        self, ctx: BuildContext, in_features: int, outputs: dict[str, int], *, bias: bool = False
    ) -> None:
        blocks: dict[Part, Block] = {
            part: _rank_share(ctx, total) for part, total in outputs.items()
        }
        super().__init__(ctx, in_features, blocks, bias=bias)


class QKVLinear(_Linear):
    """Outputs of a rank: its query heads, then its key heads, then its value heads."""

    def __init__(
        self,
        ctx: BuildContext,
        in_features: int,
        *,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
    ) -> None:
        ranks = ctx.communicator.world_size
        self_kv = max(1, num_kv_heads // ranks)
        first_kv = ctx.communicator.rank * num_kv_heads // ranks
        kv = Block(
            total=num_kv_heads * head_dim, first=first_kv * head_dim, size=self_kv * head_dim
        )
        q = _rank_share(ctx, num_heads * head_dim)
        super().__init__(ctx, in_features, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias=bias)
        self.num_heads = num_heads // ranks
        self.num_kv_heads = self_kv


class RowParallelLinear(_Linear):
    """`in_features`, those of all ranks, must be a multiple of the number of ranks. Rank 0 adds the
    bias and the residual, once. `reduce`: False leaves the sum over the ranks to the caller."""

    fusible = True

    def __init__(
        self,
        ctx: BuildContext,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        reduce: bool = True,
    ) -> None:
        share = in_features // ctx.communicator.world_size
        whole = Block(total=out_features, first=0, size=out_features)
        super().__init__(ctx, share, {None: whole}, bias=bias)
        self._reduce = reduce

    def weight_loader(self, param: torch.Tensor, source: TensorSource, part: Part) -> None:
        if param.dim() == 1:  # the bias
            super().weight_loader(param, source, part)
            return
        rows, width = param.shape
        check_shape(source, (rows, width * self._communicator.world_size))
        first = self._communicator.rank * width
        param.copy_(source[:, first : first + width])

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, this rank's inputs] -> [T, out_features], the same on every rank, or this rank's
        part of the sum. residual [T, out_features] is added; its memory may become the result."""
        if self._communicator.rank == 0:
            out = self.method.apply(self, x, bias=self.bias, residual=residual)
        else:
            out = self.method.apply(self, x)
        return self._communicator.all_reduce(out) if self._reduce else out
