"""CausalLM: what the engine and the loader use of a model."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from ..batch import ForwardBatch
from ..shortcuts import reset_shortcuts

# What a subclass that overrides `compute_logits` does not inherit.
_SHORTCUTS = ("greedy_tokens", "vocabulary_shard", "shard_logits")


class CausalLM(nn.Module, ABC):
    """A decoder with an output head. Constructed from (BuildContext, ModelConfig) on the meta
    device; its parameters, all of them in `Layer`s, have the names that the name rules of its
    checkpoint lead to."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        reset_shortcuts(cls, CausalLM, "compute_logits", _SHORTCUTS)

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """The last hidden states, [tokens, hidden_size]. Does not synchronise."""

    @abstractmethod
    def compute_logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """hidden [S, hidden_size] -> float32 [S, vocab_size] on rank 0; None on the others, which
        must call it too. `out`: memory of the result's shape and dtype that may become it."""

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The id of the largest logit of each row of hidden [S, hidden_size], int32 [S], -1 where
        none is finite, without writing logits; None where no kernel can. Not inherited by a
        subclass that overrides `compute_logits`."""
        return None

    def vocabulary_shard(self) -> range | None:
        """The ids whose logits `shard_logits` gives on this rank, not none, and beginning at a
        multiple of 4; None on all ranks where it gives none. Not inherited as `greedy_tokens` is
        not."""
        return None

    def shard_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the logits, float32 [S, len(vocabulary_shard())], whose elements
        are contiguous. No collective. Raises NotImplementedError without a `vocabulary_shard`."""
        raise NotImplementedError(f"{type(self).__name__} gives no logits of a rank")
