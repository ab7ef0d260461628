"""CausalLM: what the engine and the loader use of a model."""

from abc import ABC, abstractmethod

import torch
from torch import nn

from ..batch import ForwardBatch


class CausalLM(nn.Module, ABC):
    """Built on the meta device from (ctx, config); its parameters, all of `Layer`s, carry the
    checkpoint's names."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """The last hidden states, [tokens, hidden_size]. Does not synchronise."""

    @abstractmethod
    def compute_logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """hidden [S, hidden_size] -> float32 [S, vocab_size] on rank 0; None on the others, which
        must call it too. `out` is memory that may become the result."""

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The id of each row's largest logit, int32 [S], -1 for none, without writing logits; None:
        no kernel can."""
        return None
