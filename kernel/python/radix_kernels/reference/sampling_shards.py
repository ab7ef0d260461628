"""Candidates of a shard of the vocabulary, and the draw from the candidates of all."""

from __future__ import annotations

import torch

from ..sampling import LogitEdits
from .philox import uniform
from .sampling import edited_logits, normal_temperature

_HEADER = 3
_LOW = 0xFFFFFFFF
_SIGN = -(1 << 63)

Settings = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def order_words(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64: the bits of (value, id) words whose unsigned order is (value ascending, id
    descending)."""
    bits = (values + 0.0).contiguous().view(torch.int32).long() & _LOW
    key = torch.where(bits >> 31 == 1, ~bits & _LOW, bits | 1 << 31)
    return key << 32 | (~ids.long() & _LOW)


def word_values(words: torch.Tensor) -> torch.Tensor:
    """The float32 values of such words."""
    key = words >> 32 & _LOW
    bits = torch.where(key >> 31 == 1, key & 0x7FFFFFFF, ~key & _LOW)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def word_ids(words: torch.Tensor) -> torch.Tensor:
    """The ids of such words, int64."""
    return ~words & _LOW


def sampling_candidates(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    first_id: int,
    vocab_size: int,
    num_candidates: int,
    stream: int = 0,
    edits: LogitEdits | None = None,
) -> torch.Tensor:
    """See `radix_kernels.sampling_candidates`; unused words are 0."""
    rows, columns = logits.shape
    records = logits.new_zeros((rows, _HEADER + num_candidates), dtype=torch.int64)
    if rows == 0 or columns == 0:
        records[:, 1] = int(torch.tensor(-torch.inf).view(torch.int32)) & _LOW
        return records
    x = (
        logits
        if edits is None
        else edited_logits(logits, position, _shifted(edits, first_id), compute_dtype=logits.dtype)
    )
    ids = first_id + torch.arange(columns, device=logits.device).expand(rows, -1)
    largest = x.amax(-1)
    temperature = normal_temperature(temperature)
    greedy = (temperature <= 0) | ~torch.isfinite(largest / temperature)
    by_k = (top_k > 0) & (top_k < vocab_size)
    filtered = (temperature > 0) & (by_k | (top_p < 1) | (min_p > 0))
    scaled = x / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None]
    noise = -torch.log1p(-uniform(seed, position, first_id + columns, stream)[:, first_id:])
    best = order_words(torch.where(greedy[:, None], x, scaled - torch.log(noise)), ids)
    best = torch.where(torch.isfinite(x), best, 0) ^ _SIGN
    records[:, 0] = torch.where(filtered & ~greedy, 0, best.amax(-1) ^ _SIGN)
    wanted = torch.where(by_k, top_k, num_candidates).clamp(max=num_candidates)
    listed = torch.isfinite(x).sum(-1).clamp(max=wanted)
    listed = torch.where(filtered & ~greedy & torch.isfinite(largest), listed, 0)
    order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    count = min(columns, num_candidates)
    words = order_words(order.values[:, :count], ids.gather(1, order.indices[:, :count]))
    keep = torch.arange(count, device=x.device) < listed[:, None]
    records[:, _HEADER : _HEADER + count] = torch.where(keep, words, 0)
    records[:, 1] = listed << 32 | (largest.view(torch.int32).long() & _LOW)
    mass = torch.exp(scaled.double() - scaled.amax(-1, keepdim=True).double()).sum(-1)
    mass = torch.where((listed > 0) & (top_p < 1) & ~by_k, mass, torch.zeros_like(mass))
    records[:, 2] = mass.view(torch.int64)
    return records


def _shifted(edits: LogitEdits, first_id: int) -> LogitEdits:
    """Lists in ids of the shard: those before it are moved past any shard's end, since a negative
    id ends a list."""

    def shift(ids: torch.Tensor) -> torch.Tensor:
        return torch.where(ids < 0, ids, torch.where(ids < first_id, 2**31 - 1, ids - first_id))

    bias = edits.bias and (shift(edits.bias[0]), edits.bias[1])
    min_tokens = edits.min_tokens and (shift(edits.min_tokens[0]), edits.min_tokens[1])
    return LogitEdits(bias, edits.penalties, min_tokens, edits.bitmask)


def sample_candidates(
    records: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    vocab_size: int,
    stream: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `radix_kernels.sample_candidates`."""
    temperature = normal_temperature(temperature)
    ids = [
        _merge_row(
            records[:, b],
            float(temperature[b]),
            int(top_k[b]) if 0 < top_k[b] < vocab_size else 0,
            float(top_p[b]),
            float(min_p[b]),
            lambda id_, b=b: uniform(seed[b : b + 1], position[b : b + 1], id_ + 1, stream)[0, id_],
        )
        for b in range(records.shape[1])
    ]
    result = torch.tensor(ids, dtype=torch.int32, device=records.device)
    return result if out is None else out.copy_(result)


def _merge_row(
    records, temperature: float, top_k: int, top_p: float, min_p: float, noise_of
) -> int:  # type: ignore[no-untyped-def]
    tops = (records[:, 1] & _LOW).to(torch.int64)
    tops = torch.where(tops >= 1 << 31, tops - (1 << 32), tops).to(torch.int32).view(torch.float32)
    largest = tops.max() if not torch.isnan(tops).any() else tops.sum()
    if not torch.isfinite(largest):
        return -1
    scaled = tops / torch.tensor(temperature, dtype=torch.float32)
    after_all = temperature > 0 and not torch.isfinite(scaled.max())
    if not (temperature > 0 and (top_k or top_p < 1 or min_p > 0)) or after_all:
        best = records[:, 0]
        if (
            temperature > 0
        ):  # shards whose quotients overflow have left a logit, which only the row's largest may be
            best = best[tops == largest if after_all else torch.isfinite(scaled)]
        return int(word_ids((best ^ _SIGN).amax(0) ^ _SIGN))
    listed = records[:, 1] >> 32
    capacity = records.shape[1] - _HEADER
    places = torch.arange(capacity, device=records.device)
    words = records[:, _HEADER:][places < listed[:, None]] ^ _SIGN
    words = torch.sort(words, descending=True).values
    cut = (listed == capacity) & ~(
        (listed >= top_k) if top_k else torch.zeros_like(listed, dtype=torch.bool)
    )
    complete = not bool(cut.any())
    if not complete:
        words = words[words >= (records[:, -1][cut] ^ _SIGN).amax()]
    words = words ^ _SIGN
    if top_k:
        if len(words) < top_k and not complete:
            return -2
        words = words[:top_k]
    x = word_values(words).double()
    weight = torch.exp(x - x[0])
    shares = records[:, 2].contiguous().view(torch.float64) * torch.exp(
        (tops.double() - largest.double()) / temperature
    )
    total = weight.sum() if top_k else shares.nan_to_num().sum()
    before = weight.cumsum(0) - weight
    kept = torch.ones_like(weight, dtype=torch.bool)
    if top_p < 1:
        kept &= before < top_p * total
    if min_p > 0:
        kept &= weight >= min_p
    kept[0] = True
    if (
        not top_k
        and not complete
        and bool(kept.all())
        and not (top_p < 1 and weight.sum() >= top_p * total)
    ):
        return -2
    ids = word_ids(words[kept])
    u = torch.stack([noise_of(int(i)) for i in ids])
    score = word_values(words[kept]) - torch.log(-torch.log1p(-u))
    return int(ids[torch.nonzero(score == score.amax())].amin())
