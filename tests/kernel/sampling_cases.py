"""Rows to sample from, and what the definition says of them, an id at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import radix_kernels as rk
from tests.kernel.helpers import assert_same_bits, integers


def philox_python(counter: list[int], key: list[int]) -> list[int]:
    """The cipher again, in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a = c0 * 0xD2511F53
        b = c2 * 0xCD9E8D57
        c0 = (b >> 32) ^ c1 ^ k0
        c1 = b & 0xFFFFFFFF
        c2 = (a >> 32) ^ c3 ^ k1
        c3 = a & 0xFFFFFFFF
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


class Row:
    """The parameters of one row, with neutral defaults."""

    def __init__(self, **given: Any) -> None:
        self.temperature = 1.0
        self.top_k = 0
        self.top_p = 1.0
        self.min_p = 0.0
        self.seed = 0
        self.position = 0
        vars(self).update(given)


COLUMNS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "position": torch.int64,
}


def columns_of(rows: list[Row]) -> list[torch.Tensor]:
    """The parameters of the rows as `top_k_top_p_sampling` takes them, a tensor for each."""
    columns = []
    for name, dtype in COLUMNS.items():
        columns.append(torch.tensor([getattr(row, name) for row in rows], dtype=dtype))
    return columns


def sample(logits: torch.Tensor, rows: list[Row], **options: Any) -> torch.Tensor:
    before = logits.clone()
    ids = rk.top_k_top_p_sampling(logits, *columns_of(rows), **options)
    assert_same_bits(logits, before)
    assert ids.dtype == torch.int32 and ids.shape == (len(rows),)
    return ids


def kept_python(x: np.ndarray, row: Row) -> list[int]:
    """The ids that the filters leave, from the definition, in float64."""
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if 0 < row.top_k < len(x):
        order = order[: row.top_k]
    weights = np.exp(x[order].astype(np.float64) - float(x[order[0]]))
    mass = weights / weights.sum()
    kept: list[int] = []
    before = 0.0
    for i, share in zip(order, mass, strict=True):
        if kept and row.top_p < 1 and before >= row.top_p:
            break
        kept.append(i)
        before += share
    if row.min_p > 0:
        floor = row.min_p * mass[0]
        kept = [i for i, share in zip(kept, mass, strict=False) if share >= floor]
    return [i for i in kept if x[i] > -np.inf]


def draw_python(logits: torch.Tensor, row: Row, stream: int = 0) -> tuple[int, float]:
    """The id by the definition and the lead of its score over the next."""
    x = (logits / np.float32(row.temperature)).numpy()
    seed = row.seed & (2**64 - 1)
    scores = {}
    for i in kept_python(x, row):
        counter = [i // 4, row.position & 0xFFFFFFFF, stream, 0]
        word = philox_python(counter, [seed & 0xFFFFFFFF, seed >> 32])[i % 4]
        u = min((word + 0.5) * 2.0**-32, 1 - 2.0**-24)
        scores[i] = float(x[i]) - math.log(-math.log1p(-u))
    best = sorted(scores, key=lambda i: (-scores[i], i))
    lead = scores[best[0]] - scores[best[1]] if len(best) > 1 else math.inf
    return best[0], lead


def random_row(rng: torch.Generator) -> Row:
    def pick(*values: float) -> float:
        return values[int(integers(0, len(values), (), rng))]

    return Row(
        temperature=pick(0.3, 0.7, 1.0, 1.9),
        top_k=int(pick(0, -1, 1, 2, 7, 10**6)),
        top_p=pick(1.0, 0.9, 0.5, 0.05, 1.5),
        min_p=pick(0.0, 0.02, 0.3),
        seed=int(integers(-(2**62), 2**62, (), rng)),
        position=int(integers(0, 2**20, (), rng)),
    )


def clear_of_borders(logits: torch.Tensor, row: Row) -> bool:
    """No prefix mass within 1e-4 of top_p and no probability within 1e-4 of the min-p floor."""
    x = (logits / np.float32(row.temperature)).double()
    values = torch.sort(x, descending=True, stable=True).values
    if 0 < row.top_k < len(values):
        values = values[: row.top_k]
    mass = torch.softmax(values, -1)
    ratio = mass / mass[0]
    near_p = ((mass.cumsum(0) - mass - row.top_p).abs() < 1e-4).any()
    near_m = row.min_p > 0 and ((ratio - row.min_p).abs() < 1e-4 * row.min_p).any()
    return not (near_p or near_m)


IN_PROMPT = 1 << 30


def some_edits(batch: int, vocab_size: int, rng: torch.Generator) -> rk.LogitEdits:
    """All four steps, with values that round the same in any order; rows without each of them."""
    few = max(1, min(5, vocab_size))
    bias_ids = integers(0, vocab_size, (batch, few), rng).to(torch.int32)
    bias_ids[0, 0] = bias_ids[0, -1]  # twice the same
    bias_ids[1, few // 2 :] = -1
    bias_values = integers(-8, 9, (batch, few), rng).float() / 4
    counts = integers(0, 3, (batch + 1, vocab_size), rng).to(torch.int32)
    counts[integers(0, 2, counts.shape, rng).bool()] |= IN_PROMPT
    slots = torch.randperm(batch + 1, generator=rng)[:batch].to(torch.int32)
    slots[2 % batch] = -1
    rep, freq, pres = (integers(1, 5, (batch,), rng).float() / 4 + 0.5 for _ in range(3))
    stops = integers(0, vocab_size, (batch, 3), rng).to(torch.int32)
    stops[0, 1] = -1
    min_position = integers(0, 2, (batch,), rng) * 2**40
    bitmask = integers(-(2**31), 2**31, (batch, -(-vocab_size // 32)), rng).to(torch.int32)
    bitmask[:, 0] |= 3
    return rk.LogitEdits(
        bias=(bias_ids, bias_values),
        penalties=(counts, slots, rep, freq, pres),
        min_tokens=(stops, min_position),
        bitmask=bitmask,
    )


def edited_python(logits: torch.Tensor, rows: list[Row], edits: rk.LogitEdits) -> torch.Tensor:
    """The edits by the definition, an id at a time, in float32."""
    out = logits.clone()
    for b, row in enumerate(rows):
        x = [np.float32(v) for v in logits[b].tolist()]
        if edits.bias is not None:
            ids, values = edits.bias
            _add_bias(x, ids[b].tolist(), values[b].tolist())
        if edits.penalties is not None:
            counts, slots, *factors = edits.penalties
            if slots[b] >= 0:
                _penalize(x, counts[int(slots[b])].tolist(), [float(f[b]) for f in factors])
        if edits.min_tokens is not None and row.position < int(edits.min_tokens[1][b]):
            _mask_stops(x, edits.min_tokens[0][b].tolist())
        if edits.bitmask is not None:
            words = edits.bitmask[b].tolist()
            for i in range(len(x)):
                if not words[i // 32] >> (i % 32) & 1:
                    x[i] = np.float32(-math.inf)
        out[b] = torch.tensor(np.array(x))
    return out


def _add_bias(x: list[np.float32], ids: list[int], values: list[float]) -> None:
    for i, value in zip(ids, values, strict=True):
        if i < 0:
            return
        x[i] += np.float32(value)


def _penalize(x: list[np.float32], words: list[int], factors: list[float]) -> None:
    """words: how often each id was generated, with IN_PROMPT; factors: repetition, frequency,
    presence."""
    repetition, frequency, presence = (np.float32(factor) for factor in factors)
    for i, word in enumerate(words):
        if word:
            x[i] = x[i] / repetition if x[i] > 0 else x[i] * repetition
        count = word & (IN_PROMPT - 1)
        if count:
            x[i] -= frequency * np.float32(count) + presence


def _mask_stops(x: list[np.float32], stops: list[int]) -> None:
    for i in stops:
        if i < 0:
            return
        x[i] = np.float32(-math.inf)


def near_tie(logits: torch.Tensor, row: Row) -> bool:
    """Whether the rounding of float32 may decide the row: a border or two scores within 1e-4."""
    x = (logits / np.float32(row.temperature)).double()
    order = torch.sort(x, descending=True, stable=True)
    count = row.top_k if 0 < row.top_k < len(x) else len(x)
    mass = torch.softmax(order.values[:count], 0)
    before = mass.cumsum(0) - mass
    kept = torch.ones(count, dtype=torch.bool)
    if row.top_p < 1:
        if ((before - row.top_p).abs() < 1e-5).any():
            return True
        kept &= before < row.top_p
    if row.min_p > 0:
        ratio = mass / mass[0]
        if ((ratio / row.min_p - 1).abs() < 1e-5).any():
            return True
        kept &= ratio >= row.min_p
    seed = torch.tensor([row.seed])
    u = rk.reference.uniform(seed, torch.tensor([row.position]), len(x))[0].double()
    scores = (x - torch.log(-torch.log1p(-u)))[order.indices[:count][kept]]
    best = scores.topk(min(2, len(scores))).values
    return len(best) == 2 and float(best[0] - best[1]) < 1e-4


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 1000},
    {"top_k": 3000, "min_p": 0.01},
    {"top_k": 20_000, "top_p": 0.8},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.95, "min_p": 0.1},
    {"min_p": 0.05},
    {"min_p": 1e-6},
    {"top_p": 0.999},
    {"top_p": 0.01},
    {"top_p": 0.7, "min_p": 0.001},
]


def check_against_reference(logits: torch.Tensor, rows: list[Row]) -> None:
    ids = sample(logits, rows)
    expected = rk.reference.top_k_top_p_sampling(logits, *columns_of(rows))
    for i in torch.nonzero(ids != expected).flatten().tolist():
        assert near_tie(logits[i], rows[i]), vars(rows[i])
