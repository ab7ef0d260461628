"""Candidates of a shard of the vocabulary, and the draw from the candidates of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..logit_edits import LogitEdits
from .philox import uniform
from .sampling import edited_logits, normal_temperature

_HEADER = 3
_LOW = 0xFFFFFFFF
_SIGN = -(1 << 63)  # flipped, it turns the unsigned order of words into that of int64

# What a row of the draw gives where no id can be drawn.
_NOTHING = -1
_NOT_LISTED = -2


@dataclass(frozen=True, kw_only=True)
class _RowSettings:
    """How one row is drawn; top_k is 0 where it filters nothing."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


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
    x = logits
    if edits is not None:
        shifted = _shifted(edits, first_id)
        x = edited_logits(logits, position, shifted, compute_dtype=logits.dtype)
    ids = first_id + torch.arange(columns, device=logits.device).expand(rows, -1)
    largest = x.amax(-1)
    temperature = normal_temperature(temperature)
    greedy = (temperature <= 0) | ~torch.isfinite(largest / temperature)
    by_k = (top_k > 0) & (top_k < vocab_size)
    filtered = (temperature > 0) & (by_k | (top_p < 1) | (min_p > 0))
    scaled = x / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None]
    noise = -torch.log1p(-uniform(seed, position, first_id + columns, stream)[:, first_id:])
    score = torch.where(greedy[:, None], x, scaled - torch.log(noise))
    words = torch.where(torch.isfinite(x), order_words(score, ids), 0)
    records[:, 0] = torch.where(filtered & ~greedy, 0, _largest_word(words, -1))
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


def _largest_word(words: torch.Tensor, dim: int) -> torch.Tensor:
    """The largest along a dimension in unsigned order."""
    return (words ^ _SIGN).amax(dim) ^ _SIGN


def _shifted(edits: LogitEdits, first_id: int) -> LogitEdits:
    """The edits with lists in ids of the shard: ids before it are moved past any shard's end, since
    a negative id ends a list."""

    def shift(ids: torch.Tensor) -> torch.Tensor:
        return torch.where(ids < 0, ids, torch.where(ids < first_id, 2**31 - 1, ids - first_id))

    bias = edits.bias
    if bias is not None:
        bias = (shift(bias[0]), bias[1])
    min_tokens = edits.min_tokens
    if min_tokens is not None:
        min_tokens = (shift(min_tokens[0]), min_tokens[1])
    return replace(edits, bias=bias, min_tokens=min_tokens)


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
    ids = []
    for row in range(records.shape[1]):
        k = int(top_k[row])
        settings = _RowSettings(
            temperature=float(temperature[row]),
            top_k=k if 0 < k < vocab_size else 0,
            top_p=float(top_p[row]),
            min_p=float(min_p[row]),
        )
        noise_of = _row_noise(seed[row : row + 1], position[row : row + 1], stream)
        ids.append(_draw_row(records[:, row], settings, noise_of))
    result = torch.tensor(ids, dtype=torch.int32, device=records.device)
    return result if out is None else out.copy_(result)


def _row_noise(
    seed: torch.Tensor, position: torch.Tensor, stream: int
) -> Callable[[int], torch.Tensor]:
    """The uniform number of an id in one row."""

    def noise_of(token_id: int) -> torch.Tensor:
        return uniform(seed, position, token_id + 1, stream)[0, token_id]

    return noise_of


def _draw_row(
    records: torch.Tensor, settings: _RowSettings, noise_of: Callable[[int], torch.Tensor]
) -> int:
    """The id of one row from the records [W, 3 + C] of its shards; -1 where the logits allow none,
    -2 where the filters may keep ids that no shard listed."""
    tops = _shard_maxima(records)
    largest = tops.sum() if torch.isnan(tops).any() else tops.max()
    if not torch.isfinite(largest):
        return _NOTHING
    filtered = settings.top_k > 0 or settings.top_p < 1 or settings.min_p > 0
    if not settings.temperature > 0:
        return int(word_ids(_largest_word(records[:, 0], 0)))
    scaled = tops / torch.tensor(settings.temperature, dtype=torch.float32)
    overflows = not torch.isfinite(scaled.max())
    if overflows or not filtered:
        # A shard whose quotients overflow left a logit: only the row's largest may be drawn then.
        usable = tops == largest if overflows else torch.isfinite(scaled)
        return int(word_ids(_largest_word(records[:, 0][usable], 0)))
    words, complete = _listed_words(records, settings.top_k)
    if settings.top_k > 0:
        if len(words) < settings.top_k and not complete:
            return _NOT_LISTED
        words = words[: settings.top_k]
    kept = _kept_words(words, complete, _total_mass(records, tops, settings.temperature), settings)
    if kept is None:
        return _NOT_LISTED
    ids = word_ids(words[kept])
    noise = torch.stack([noise_of(int(token_id)) for token_id in ids])
    score = word_values(words[kept]) - torch.log(-torch.log1p(-noise))
    return int(ids[torch.nonzero(score == score.amax())].amin())


def _shard_maxima(records: torch.Tensor) -> torch.Tensor:
    """float32 [W]: the largest logit of each shard, from the low half of its second word."""
    bits = (records[:, 1] & _LOW).to(torch.int64)
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)


def _listed_words(records: torch.Tensor, top_k: int) -> tuple[torch.Tensor, bool]:
    """(the candidates of all shards in falling order, whether no other id can be among them).

    A shard that filled its list may have left out ids; those below its last one are dropped.
    """
    listed = records[:, 1] >> 32
    capacity = records.shape[1] - _HEADER
    places = torch.arange(capacity, device=records.device)
    keys = records[:, _HEADER:][places < listed[:, None]] ^ _SIGN
    keys = torch.sort(keys, descending=True).values
    cut_off = listed == capacity
    if top_k > 0:
        cut_off &= listed < top_k
    complete = not bool(cut_off.any())
    if not complete:
        keys = keys[keys >= (records[:, -1][cut_off] ^ _SIGN).amax()]
    return keys ^ _SIGN, complete


def _total_mass(records: torch.Tensor, tops: torch.Tensor, temperature: float) -> torch.Tensor:
    """The mass of all ids relative to the largest, from the shards' own masses (float64)."""
    masses = records[:, 2].contiguous().view(torch.float64)
    shares = masses * torch.exp((tops.double() - tops.max().double()) / temperature)
    return shares.nan_to_num().sum()


def _kept_words(
    words: torch.Tensor, complete: bool, total_mass: torch.Tensor, settings: _RowSettings
) -> torch.Tensor | None:
    """bool: the candidates that top-p and min-p keep; None where ids not listed may be kept."""
    values = word_values(words).double()
    weight = torch.exp(values - values[0])
    total = weight.sum() if settings.top_k > 0 else total_mass
    before = weight.cumsum(0) - weight
    kept = torch.ones_like(weight, dtype=torch.bool)
    if settings.top_p < 1:
        kept &= before < settings.top_p * total
    if settings.min_p > 0:
        kept &= weight >= settings.min_p
    kept[0] = True
    if settings.top_k == 0 and not complete and bool(kept.all()):
        nucleus_ends = settings.top_p < 1 and weight.sum() >= settings.top_p * total
        if not nucleus_ends:
            return None
    return kept
