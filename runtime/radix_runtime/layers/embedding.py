"""Token embedding and output head, split over the ranks by vocabulary."""

import torch

from ..quantization.config import LayerKind
from ..quantization.params import Block, LinearShape
from .base import BuildContext
from .weight import WeightLayer

_UNIT = 4  # ids; the op that lists candidates of a rank takes no other first ones


class VocabParallel(WeightLayer):
    """A [vocab_size, hidden_size] matrix, by its `kind` an embedding, an output head or, tied, both
    from one copy. Each rank has ceil(vocab_size / ranks) rows, rounded up to a multiple of four;
    rows past the end of the vocabulary are zero."""

    def __init__(
        self, ctx: BuildContext, vocab_size: int, hidden_size: int, *, kind: LayerKind
    ) -> None:
        comm = ctx.communicator
        size = vocab_size
        if comm.world_size > 1:
            size = _UNIT * -(-vocab_size // (_UNIT * comm.world_size))
        rows = Block(total=vocab_size, first=comm.rank * size, size=size)
        shape = LinearShape(name=ctx.name, inputs=Block.whole(hidden_size), parts={None: rows})
        super().__init__(ctx, shape, kind)
        self.vocab_size = vocab_size
        self._communicator = comm
        self._rows = rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int32 [T] -> [T, hidden_size], the same on every rank."""
        if self._communicator.world_size == 1:
            return self.method.embedding(self, ids)
        local = ids - self._rows.first
        elsewhere = (local < 0) | (local >= self._rows.size)
        out = self.method.embedding(self, local.masked_fill_(elsewhere, 0))
        return self._communicator.all_reduce(out.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """hidden [S, hidden_size] -> float32 [S, vocab_size] on rank 0; None on the others, which
        must call it too. `out`: memory of the result's shape and dtype that may become it."""
        is_whole = self._communicator.world_size == 1
        target = out if is_whole else None  # a rank's part has a shape of its own
        part = self.method.apply(self, hidden, out=target, out_dtype=torch.float32)
        parts = self._communicator.gather(part)
        if parts is None:
            return None
        return parts.movedim(0, 1).flatten(1)[:, : self.vocab_size]

    @property
    def shard(self) -> range | None:
        """The ids that this rank has; None where one rank has all of them, or one of several has
        none."""
        rows = self._rows
        ranks = self._communicator.world_size
        if ranks == 1 or (ranks - 1) * rows.size >= self.vocab_size:
            return None
        return range(rows.first, min(rows.first + rows.size, self.vocab_size))

    def shard_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden_size] -> the logits of `shard`, float32 [S, len(shard)], a view."""
        shard = self.shard
        assert shard is not None
        part = self.method.apply(self, hidden, out_dtype=torch.float32)
        return part[:, : len(shard)]

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The id of the largest logit of each row of hidden [S, hidden_size], int32 [S], -1 where
        none is finite, without writing logits. None where no kernel can, and with several ranks."""
        if self._communicator.world_size > 1:
            return None
        return self.method.argmax(self, hidden)
