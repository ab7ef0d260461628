"""Token embedding and output head, split over the ranks by vocabulary."""

import torch

from .. import ops
from ..quantization.dense import DenseMethod
from .base import BuildContext, Layer, Part, TensorSource, check_shape


class VocabParallel(Layer):
    """A [vocab, hidden] matrix, as embedding, as output head (then packed for matrix products) or,
    tied, as both from one copy. Each rank has ceil(vocab / ranks) rows; rows past the end of the
    vocabulary are zero."""

    def __init__(
        self, ctx: BuildContext, vocab_size: int, hidden_size: int, *, is_head: bool
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._communicator, self._is_head = ctx.communicator, is_head
        self._size = -(-vocab_size // ctx.communicator.world_size)
        self._first = ctx.communicator.rank * self._size
        self._method = ctx.linear_method.for_head() or DenseMethod()
        self._method.create(self, hidden_size, self._size, ctx.dtype)

    def weight_loader(self, param: torch.Tensor, source: TensorSource, part: Part) -> None:
        check_shape(source, (self.vocab_size, param.shape[1]))
        if count := max(0, min(self._size, self.vocab_size - self._first)):
            param[:count].copy_(source[self._first : self._first + count])
        param[count:].zero_()

    def finalize(self, name: str) -> None:
        if self._is_head:
            self._method.finalize(self, name)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int32 [T] -> [T, hidden], the same on every rank."""
        if self._communicator.world_size == 1:
            return ops.embedding(ids, self.weight)
        local = ids - self._first
        elsewhere = (local < 0) | (local >= self._size)
        out = ops.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return self._communicator.all_reduce(out.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """See CausalLM: hidden [S, hidden] -> float32 [S, vocab] on rank 0, None on the others."""
        parts = self._communicator.gather(
            self._method.apply(self, hidden, out=out, out_dtype=torch.float32)
        )
        return None if parts is None else parts.movedim(0, 1).flatten(1)[:, : self.vocab_size]

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """See CausalLM: for one rank whose method multiplies by a packed weight and does no
        more."""
        plain = type(self._method).apply is DenseMethod.apply and isinstance(
            self.weight, ops.PackedWeight
        )
        return (
            ops.linear_argmax(hidden, self.weight)[0]
            if plain and self._communicator.world_size == 1
            else None
        )
