"""The log-probabilities of a prompt's tokens, and their ranks."""

from collections.abc import Callable
from typing import Any

import torch

from .. import ops
from ..step_plan import LogprobSpan, SpanScores

_BLOCK = 16  # rows at once, few enough for the cache of a CPU


def span_scores(
    logits: torch.Tensor,
    targets: torch.Tensor,
    span: LogprobSpan,
    to_host: Callable[[torch.Tensor], Any],
) -> SpanScores:
    """What `span`, whose tokens have these logits, asks for its `targets`, on the host."""
    logprobs, top_logprobs, top_ids = ops.token_logprobs(logits, targets, span.top_n)
    return SpanScores(
        logprobs=to_host(logprobs),
        top_ids=to_host(top_ids),
        top_logprobs=to_host(top_logprobs),
        ranks=to_host(token_ranks(logits, targets)) if span.ranks else None,
    )


def token_ranks(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rank of id i in row i, 1 for the largest logit, ties to the lowest id: the place that the
    id has, or would have, in the list of `token_logprobs`.

    logits: float32 [n, V], finite; ids: int32 [n], 0 .. V-1. Returns int32 [n]."""
    ranks = torch.empty(len(ids), dtype=torch.int32, device=logits.device)
    columns = torch.arange(logits.shape[1], device=logits.device)
    for start in range(0, len(ids), _BLOCK):
        rows = logits[start : start + _BLOCK]
        own = ids[start : start + _BLOCK, None].long()
        value = rows.gather(1, own)
        is_before = (rows > value) | ((rows == value) & (columns < own))
        ranks[start : start + _BLOCK] = is_before.count_nonzero(dim=1) + 1
    return ranks
