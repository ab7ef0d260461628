"""From hidden states to logits over the whole vocabulary."""

from __future__ import annotations

import torch

from ..distributed import Communicator
from .embedding import VocabParallel


def compute_logits(
    head: VocabParallel, hidden: torch.Tensor, communicator: Communicator
) -> torch.Tensor | None:
    """hidden [S, hidden] -> float32 [S, vocab] on rank 0, None on the others."""
    local = head.logits(hidden)
    if communicator.world_size == 1:
        return local.float()
    parts = communicator.gather(local)
    if parts is None:
        return None
    return parts.movedim(0, 1).flatten(1)[:, : head.vocab_size].float()
