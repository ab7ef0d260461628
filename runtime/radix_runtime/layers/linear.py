"""Linear layers and how tensor parallelism cuts them.

ReplicatedLinear       every rank has it whole
ColumnParallelLinear   outputs are split; several checkpoint tensors may be merged in one
MergedLinear           outputs of several checkpoint tensors, of which each is split or whole
QKVLinear              column parallel by heads; KV heads repeat where ranks outnumber them
RowParallelLinear      inputs are split; the partial sums are reduced over the ranks"""

from collections.abc import Mapping

import torch

from ..quantization.base import Input, Quantized
from ..quantization.config import LayerKind
from ..quantization.params import Block, LinearShape, Part
from .base import BuildContext, Fusible
from .weight import WeightLayer


class _Linear(WeightLayer, Fusible):
    """y = x W^T + b. The rows of W (and b) are this rank's blocks of one or more checkpoint
    tensors, in the order of `blocks`; `sizes` are their outputs."""

    fusible = True

    def __init__(
        self,
        ctx: BuildContext,
        inputs: Block,
        blocks: Mapping[Part, Block],
        *,
        bias: bool,
        kind: LayerKind,
    ) -> None:
        shape = LinearShape(name=ctx.name, inputs=inputs, parts=blocks)
        super().__init__(ctx, shape, kind, bias=bias)
        self.sizes = shape.sizes
        self._communicator = ctx.communicator

    def block(self, part: Part) -> Block:
        """This rank's rows of a checkpoint tensor."""
        return self.shape.parts[part]

    def forward(self, x: Input) -> torch.Tensor:
        """x [T, in_features] -> [T, sum(sizes)]."""
        return self._product(x, bias=self.bias)

    def _product(
        self, x: Input, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(x, Quantized):
            return self.method.apply_codes(self, x, bias=bias, residual=residual)
        return self.method.apply(self, x, bias=bias, residual=residual)


class ReplicatedLinear(_Linear):
    """Every rank has all outputs."""

    def __init__(
        self,
        ctx: BuildContext,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        kind: LayerKind = LayerKind.LINEAR,
    ) -> None:
        blocks: dict[Part, Block] = {None: Block.whole(out_features)}
        super().__init__(ctx, Block.whole(in_features), blocks, bias=bias, kind=kind)


class ColumnParallelLinear(_Linear):
    """`outputs`: the checkpoint's names of the merged layers and their outputs of all ranks, each a
    multiple of the number of ranks."""

    def __init__(
        self,
        ctx: BuildContext,
        in_features: int,
        outputs: Mapping[Part, int],
        *,
        bias: bool = False,
        kind: LayerKind = LayerKind.LINEAR,
    ) -> None:
        comm = ctx.communicator
        blocks = {
            part: Block.share(total, comm.rank, comm.world_size) for part, total in outputs.items()
        }
        super().__init__(ctx, Block.whole(in_features), blocks, bias=bias, kind=kind)


class MergedLinear(_Linear):
    """`blocks`: this rank's outputs of each of the checkpoint's layers that are merged, by name."""

    def __init__(
        self, ctx: BuildContext, in_features: int, blocks: Mapping[Part, Block], *, bias: bool
    ) -> None:
        inputs = Block.whole(in_features)
        super().__init__(ctx, inputs, blocks, bias=bias, kind=LayerKind.LINEAR)


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
        q = Block.share(num_heads * head_dim, ctx.communicator.rank, ranks)
        blocks: dict[Part, Block] = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        super().__init__(ctx, Block.whole(in_features), blocks, bias=bias, kind=LayerKind.LINEAR)
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
        kind: LayerKind = LayerKind.LINEAR,
    ) -> None:
        comm = ctx.communicator
        share = Block.share(in_features, comm.rank, comm.world_size)
        blocks: dict[Part, Block] = {None: Block.whole(out_features)}
        super().__init__(ctx, share, blocks, bias=bias, kind=kind)
        self._reduce = reduce

    def forward(self, x: Input, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, this rank's inputs] -> [T, out_features], the same on every rank, or this rank's
        part of the sum. residual [T, out_features] is added; its memory may become the result."""
        out = self.part(x, residual)
        return self._communicator.all_reduce(out) if self._reduce else out

    @property
    def adds_bias(self) -> bool:
        """Whether it is this rank that adds the bias."""
        return self.bias is not None and self._communicator.rank == 0

    def part(self, x: Input, residual: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of the sum that `forward` gives."""
        if self._communicator.rank == 0:
            return self._product(x, bias=self.bias, residual=residual)
        return self._product(x)
