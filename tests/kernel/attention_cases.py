"""Paged attention problems and an oracle in numpy, shared by the native and the Triton tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tests.kernel.helpers import integers, spread

# What every kernel has branches of its own for.
OPTIONS = {
    "plain": {},
    "not causal": {"causal": False},
    "window": {"window_size": (7, 0)},
    "window of one": {"window_size": (0, 0)},
    "window without causal": {"window_size": (33, -1), "causal": False},
    "right 0 is causal": {"window_size": (-1, 0), "causal": False},
    "softcap": {"softcap": 5.0},
    "scale": {"softmax_scale": 0.31},
    "sinks": {"sinks": True},
    "all": {"sinks": True, "softcap": 20.0, "window_size": (21, 0), "softmax_scale": 0.2},
}


@dataclass
class Case:
    """A batch of (q_len, kv_len) rows over a paged cache that is NaN wherever nothing may read."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    kv_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.page_table,
            self.kv_lens,
            self.cu_seqlens_q,
        )


def make_case(
    rows: list[tuple[int, int]],
    rng: torch.Generator,
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    v_dim: int | None = None,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    hnd: bool = False,
    gap: int = 0,
) -> Case:
    """Random rows; pages are scattered, page ids past a row's end point far outside the cache.

    v_dim: size of a value where it is not `dim`.
    """
    needed = [-(-kv // page_size) for _, kv in rows]
    pages = sum(needed) + 3
    width = max([*needed, 0]) + 2
    shape = (pages, heads[1], page_size) if hnd else (pages, page_size, heads[1])
    k_cache = torch.full((*shape, dim), math.nan, dtype=dtype)
    v_cache = torch.full((*shape, v_dim or dim), math.nan, dtype=dtype)
    if hnd:
        k_cache = k_cache.transpose(1, 2)
        v_cache = v_cache.transpose(1, 2)
    free = torch.randperm(pages, generator=rng)
    table = torch.full((len(rows), width), 2**30, dtype=torch.int32)
    case = Case(
        q=spread((sum(n for n, _ in rows), heads[0], dim), dtype, rng, gap=gap),
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=table,
        kv_lens=torch.tensor([kv for _, kv in rows], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *np.cumsum([n for n, _ in rows])], dtype=torch.int32),
    )
    for row, (_, kv) in enumerate(rows):
        mine = free[: needed[row]]
        free = free[needed[row] :]
        table[row, : needed[row]] = mine.to(torch.int32)
        for cache, kept in ((case.k_cache, case.keys), (case.v_cache, case.values)):
            kept.append(spread((kv, heads[1], cache.shape[-1]), dtype, rng))
            for token in range(kv):
                cache[mine[token // page_size], token % page_size] = kept[-1][token]
    return case


def varlen_args(case: Case) -> tuple[torch.Tensor, ...]:
    """What `flash_attn_varlen` takes for the same problem."""
    lengths = torch.tensor([0, *(key.shape[0] for key in case.keys)])
    return (
        case.q,
        torch.cat(case.keys),
        torch.cat(case.values),
        case.cu_seqlens_q,
        lengths.cumsum(0).to(torch.int32),
    )


def random_rows(count: int, rng: torch.Generator, longest: int = 150) -> list[tuple[int, int]]:
    """Decode rows, prefills, chunks behind a cached prefix, and rows with nothing to do."""
    rows = []
    for kind in integers(0, 4, (count,), rng).tolist():
        kv = int(integers(1, longest, (), rng))
        n = [1, kv, int(integers(1, kv + 1, (), rng)), 0][kind]
        rows.append((n, kv))
    return rows


def amplitude(case: Case, **options: Any) -> Callable[[], torch.Tensor]:
    """Sums of probabilities times the magnitudes of values: what rounding the probabilities is
    relative to."""
    magnitudes = replace(case, values=[values.abs() for values in case.values])
    return lambda: oracle(magnitudes, **options)[0]


def oracle(case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in float64, one query and head at a time, straight from the definition."""
    scale = options.get("softmax_scale") or case.q.shape[-1] ** -0.5
    left, right = options.get("window_size", (-1, -1))
    causal = options.get("causal", True) or right == 0
    sinks = options.get("sinks")
    softcap = options.get("softcap", 0.0)
    q = case.q.double().numpy()
    out = np.zeros((*q.shape[:2], case.v_cache.shape[-1]))
    lse = np.full(q.shape[:2], -np.inf)
    starts = case.cu_seqlens_q.tolist()
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        k = keys.double().numpy()
        v = values.double().numpy()
        n = starts[row + 1] - starts[row]
        m = k.shape[0]
        for i in range(n):
            position = m - n + i
            first = max(0, position - left) if left >= 0 else 0
            last = min(position + 1, m) if causal else m
            for h in range(q.shape[1]):
                g = h // (q.shape[1] // k.shape[1])
                s = k[first : max(last, first), g] @ q[starts[row] + i, h] * scale
                s = softcap * np.tanh(s / softcap) if softcap else s
                full = s if sinks is None else np.append(s, float(sinks[h]))
                if not full.size:
                    continue
                top = full.max()
                total = np.exp(full - top).sum()
                lse[starts[row] + i, h] = top + np.log(total)
                weights = np.exp(s - top) / total
                out[starts[row] + i, h] = weights @ v[first : max(last, first), g]
    return torch.from_numpy(out), torch.from_numpy(lse)


def quantized(case: Case) -> tuple[Case, dict[str, torch.Tensor]]:
    """The case with an INT8 cache and its scales, which are NaN where nothing may read."""
    k_cache, k_scale = _to_int8(case.k_cache)
    v_cache, v_scale = _to_int8(case.v_cache)
    narrow = replace(
        case,
        k_cache=k_cache,
        v_cache=v_cache,
        keys=_stored(case, k_cache, k_scale),
        values=_stored(case, v_cache, v_scale),
    )
    return narrow, {"k_scale": k_scale, "v_scale": v_scale}


def _to_int8(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = cache.float()
    scale = wide.abs().amax(-1) / 127  # NaN where the cache is
    return (wide / scale[..., None]).nan_to_num(99).round().to(torch.int8), scale


def _stored(case: Case, cache: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
    """What the cache holds of each row, in float64."""
    wide = cache.double() * scale.double()[..., None]
    rows = []
    for row, length in enumerate(case.kv_lens.tolist()):
        pages = case.page_table[row, : -(-length // wide.shape[1])].long()
        rows.append(wide[pages].flatten(0, 1)[:length])
    return rows
