"""Token embedding and output head, split over the ranks by vocabulary."""

import torch

from .. import ops
from ..families.tensor_views import TensorSource
from ..quantization.dense import DenseMethod
from .base import BuildContext, Layer, Part, check_shape


class VocabParallel(Layer):
    """A [vocab_size, hidden_size] matrix: an embedding, an output head (`is_head`; packed for
    matrix products) or, tied, both from one copy. Each rank has ceil(vocab_size / ranks) rows; rows
    past the end of the vocabulary are zero."""

    def __init__(
        self, ctx: BuildContext, vocab_size: int, hidden_size: int, *, is_head: bool
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._communicator = ctx.communicator
        self._is_head = is_head
        self._size = -(-vocab_size // ctx.communicator.world_size)
        self._first = ctx.communicator.rank * self._size
        self._method = ctx.linear_method.for_head() or DenseMethod()
        self._method.create(self, hidden_size, self._size, ctx.dtype)

    def weight_loader(self, param: torch.Tensor, source: TensorSource, part: Part) -> None:
        check_shape(source, (self.vocab_size, param.shape[1]))
        count = max(0, min(self._size, self.vocab_size - self._first))
        if count > 0:
            param[:count].copy_(source[self._first : self._first + count])
        param[count:].zero_()

    def finalize(self, name: str) -> None:
        if self._is_head:
            self._method.finalize(self, name)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int32 [T] -> [T, hidden_size], the same on every rank."""
        if self._communicator.world_size == 1:
            return ops.embedding(ids, self.weight)
        local = ids - self._first
        elsewhere = (local < 0) | (local >= self._size)
        out = ops.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return self._communicator.all_reduce(out.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """hidden [S, hidden_size] -> float32 [S, vocab_size] on rank 0; None on the others, which
        must call it too. `out`: memory of the result's shape and dtype that may become it."""
        part = self._method.apply(self, hidden, out=out, out_dtype=torch.float32)
        parts = self._communicator.gather(part)
        if parts is None:
            return None
        return parts.movedim(0, 1).flatten(1)[:, : self.vocab_size]

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The id of the largest logit of each row of hidden [S, hidden_size], int32 [S], -1 where
        none is finite, without writing logits. None where no kernel can, and with several ranks."""
        if self._communicator.world_size > 1:
            return None
        return self._method.argmax(self, hidden)
