"""Penalties, sampling and log-probabilities."""

from __future__ import annotations

import torch

from ..logit_edits import LogitEdits
from .philox import uniform

_IN_PROMPT = 1 << 30


def apply_penalties_inplace(
    logits: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    *,
    compute_dtype: torch.dtype = torch.float64,
) -> None:
    """See `radix_kernels.apply_penalties_inplace`."""
    rows = (slots >= 0).nonzero().squeeze(1)
    words = counts[slots[rows].long()]
    count = (words & (_IN_PROMPT - 1)).to(compute_dtype)
    x = logits[rows].to(compute_dtype)
    factor = repetition[rows, None].to(compute_dtype)
    x = torch.where(words != 0, torch.where(x > 0, x / factor, x * factor), x)
    # Tokens never generated keep their bits, infinities included.
    per_count = frequency[rows, None].to(compute_dtype)
    once = presence[rows, None].to(compute_dtype)
    x = torch.where(count > 0, x - (per_count * count + once), x)
    logits[rows] = x.to(logits.dtype)


def count_tokens_inplace(counts: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor) -> None:
    """See `radix_kernels.count_tokens_inplace`."""
    rows = ((slots >= 0) & (ids >= 0)).nonzero().squeeze(1)
    where = (slots[rows].long(), ids[rows].long())
    counts.index_put_(where, torch.ones_like(ids[rows]), accumulate=True)


def edited_logits(
    logits: torch.Tensor,
    position: torch.Tensor,
    edits: LogitEdits,
    *,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """A copy of the logits [B, V] with bias, penalties, minimum of tokens and bitmask applied, in
    that order. position: int64 [B]."""
    x = logits.clone()
    if edits.bias is not None:
        ids, values = edits.bias
        row, id_, where = _listed(ids, x.shape[1])
        wide = x.to(compute_dtype).index_put(
            (row, id_), values[where].to(compute_dtype), accumulate=True
        )
        x = wide.to(x.dtype)
    if edits.penalties is not None:
        apply_penalties_inplace(x, *edits.penalties, compute_dtype=compute_dtype)
    if edits.min_tokens is not None:
        stop_ids, min_position = edits.min_tokens
        early = (position < min_position)[:, None]
        row, id_, _ = _listed(stop_ids.masked_fill(~early, -1), x.shape[1])
        x[row, id_] = -torch.inf
    if edits.bitmask is not None:
        bits = torch.arange(32, device=x.device, dtype=torch.int32)
        allowed = (edits.bitmask[:, :, None] >> bits & 1).flatten(1)[:, : x.shape[1]]
        x = x.masked_fill(allowed == 0, -torch.inf)
    return x


def _listed(ids: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows and ids of lists that end at the first negative id, and the mask of where they stand."""
    where = ((ids < 0).to(torch.int32).cumsum(1) == 0) & (ids < vocab_size)
    return where.nonzero()[:, 0], ids[where].long(), where


def normal_temperature(temperature: torch.Tensor) -> torch.Tensor:
    """Infinity counts as the largest number, which leaves forbidden logits at -inf; less than the
    least normal number counts as 0."""
    info = torch.finfo(torch.float32)
    return temperature.clamp(max=info.max).masked_fill(temperature < info.tiny, 0)


def kept_ids(
    x: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """bool [B, V]: the ids that top-k, top-p and min-p leave of scaled logits x [B, V]."""
    order = torch.sort(x, dim=-1, descending=True, stable=True)
    vocab_size = x.shape[-1]
    ranks = torch.arange(vocab_size, device=x.device)[None, :]
    limit = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    keep = ranks < limit[:, None]
    values = order.values.to(compute_dtype).masked_fill(~keep, -torch.inf)
    mass = torch.softmax(values, -1)
    before = mass.cumsum(-1) - mass
    keep &= (before < top_p[:, None]) | ~(top_p[:, None] < 1) | (ranks == 0)
    ratio = torch.exp(values - values[:, :1])
    keep &= (ratio >= min_p[:, None]) | ~(min_p[:, None] > 0) | (ranks == 0)
    keep &= order.values > -torch.inf
    return torch.zeros_like(keep).scatter_(1, order.indices, keep)


def top_k_top_p_sampling(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    stream: int = 0,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.top_k_top_p_sampling`; compute_dtype is that of the top-p masses."""
    rows, vocab_size = logits.shape
    if rows == 0 or vocab_size == 0:
        ids = torch.full((rows,), -1, dtype=torch.int32, device=logits.device)
        return ids if out is None else out.copy_(ids)
    largest = logits.amax(-1)
    temperature = normal_temperature(temperature)
    greedy = (temperature <= 0) | ~torch.isfinite(largest / temperature)
    x = logits / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None]
    keep = kept_ids(x, top_k, top_p, min_p, compute_dtype=compute_dtype)
    noise = -torch.log1p(-uniform(seed, position, vocab_size, stream))
    score = (x - torch.log(noise)).masked_fill(~keep, -torch.inf)
    score = torch.where(greedy[:, None], logits, score)
    # argmax on ties: torch promises no order, so take the first id that equals the maximum.
    ids = (score == score.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)
    ids = torch.where(torch.isfinite(largest), ids, -1).to(torch.int32)
    return ids if out is None else out.copy_(ids)


def token_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    top_n: int = 0,
    *,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `radix_kernels.token_logprobs`; float32, or float64 for float64 logits."""
    if ids.device.type == "cpu" and ids.numel():
        low = int(ids.min())
        high = int(ids.max())
        vocab_size = logits.shape[1]
        if low < -1 or high >= vocab_size:
            wrong = low if low < -1 else high
            raise ValueError(f"token_logprobs: ids holds {wrong}, expected -1 .. {vocab_size - 1}")
    logprobs = torch.log_softmax(logits.to(compute_dtype), -1)
    picked = logprobs.gather(1, ids.clamp(min=0).long()[:, None]).squeeze(1)
    picked = picked.masked_fill(ids < 0, torch.nan)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_n]
    top = logprobs.gather(1, order)
    return picked.to(logits.dtype), top.to(logits.dtype), order.to(torch.int32)
