"""Norms, activations, rotary embedding and the stores into the paged cache."""

from __future__ import annotations

from typing import Any

import torch

from .bounds import EXACT, ROUNDED_ONCE
from .trial import Trial, case, reference, rk

_ROWS = ((1, 64), (7, 1000), (33, 4096))
_PAGES = 5
_PAGE_SIZE = 4
_SLOTS = _PAGES * _PAGE_SIZE


@case
def rmsnorm(t: Trial) -> None:
    for rows, width in _ROWS:
        x = t.randn(rows, width)
        weight = t.randn(width)
        out = t.poisoned(rows, width)
        rk.rmsnorm(t.there(x), t.there(weight), 1e-5, out=out)
        exact = reference.rmsnorm(x.double(), weight.double(), 1e-5)
        t.near(out, exact, ROUNDED_ONCE[t.name])


@case
def fused_add_rmsnorm(t: Trial) -> None:
    for rows, width in _ROWS:
        x = t.randn(rows, width)
        residual = t.randn(rows, width)
        weight = t.randn(width)
        got = t.there(x)
        sums = t.there(residual)
        rk.fused_add_rmsnorm(got, sums, t.there(weight))
        exact = x.double()
        exact_sums = residual.double()
        reference.fused_add_rmsnorm(exact, exact_sums, weight.double())
        t.same(sums, exact_sums.to(residual.dtype))
        t.near(got, exact, ROUNDED_ONCE[t.name])


@case
def layernorm(t: Trial) -> None:
    for rows, width in _ROWS:
        x = t.randn(rows, width)
        weight = t.randn(width)
        bias = t.randn(width)
        out = t.poisoned(rows, width)
        rk.layernorm(t.there(x), t.there(weight), t.there(bias), out=out)
        exact = reference.layernorm(x.double(), weight.double(), bias.double())
        t.near(out, exact, ROUNDED_ONCE[t.name])


@case
def silu_and_mul(t: Trial) -> None:
    _activation(t, "silu_and_mul")


@case
def gelu_and_mul(t: Trial) -> None:
    _activation(t, "gelu_and_mul")


@case
def gelu_tanh_and_mul(t: Trial) -> None:
    _activation(t, "gelu_tanh_and_mul")


def _activation(t: Trial, name: str) -> None:
    for rows, width in ((1, 16), (5, 333), (17, 2048)):
        x = t.randn(rows, 2 * width)
        out = t.poisoned(rows, width)
        getattr(rk, name)(t.there(x), out=out)
        t.near(out, getattr(reference, name)(x.double()), ROUNDED_ONCE[t.name])


@case
def apply_rope_inplace(t: Trial) -> None:
    for head, rotary, is_neox in ((128, 128, True), (80, 40, True), (64, 64, False)):
        table = reference.rope_cos_sin_cache(rotary, 50, 10000.0)
        positions = t.integers(0, 50, 9, dtype=torch.int64)
        q = t.randn(9, 3, head)
        k = t.randn(9, 1, head)
        got = [t.there(q), t.there(k)]
        rk.apply_rope_inplace(t.there(positions), *got, head, t.there(table), is_neox=is_neox)
        exact = [q.double(), k.double()]
        reference.apply_rope_inplace(positions, *exact, head, table.double(), is_neox=is_neox)
        for one, other in zip(got, exact, strict=True):
            t.near(one, other, ROUNDED_ONCE[t.name])


@case
def fused_qk_norm_rope_store(t: Trial) -> None:
    for head, with_norm in ((128, True), (64, False)):
        table = reference.rope_cos_sin_cache(head, 50, 10000.0)
        positions = t.integers(0, 50, 7, dtype=torch.int64)
        slots = t.shuffled(_SLOTS)[:7]
        slots[2] = -1
        rows = [t.randn(7, heads, head) for heads in (4, 2, 2)]
        weights = [t.randn(head), t.randn(head)] if with_norm else [None, None]
        caches = [t.randn(_PAGES, _PAGE_SIZE, 2, head) for _ in range(2)]
        got = [t.there(x) for x in (*rows, *caches)]
        given = [None if w is None else t.there(w) for w in weights]
        _store(rk, got, given, [t.there(x) for x in (table, positions, slots)])
        exact = [x.double() for x in (*rows, *caches)]
        wide = [None if w is None else w.double() for w in weights]
        _store(reference, exact, wide, [table.double(), positions, slots])
        t.near(got[0], exact[0], ROUNDED_ONCE[t.name])
        t.near(got[3], exact[3], ROUNDED_ONCE[t.name])
        t.same(got[4], exact[4].to(t.dtype))


def _store(where: Any, tensors: list[Any], weights: list[Any], places: list[Any]) -> None:
    q, k, v, k_cache, v_cache = tensors
    where.fused_qk_norm_rope_store(q, k, v, *weights, *places[:2], k_cache, v_cache, places[2])


@case
def store_kv_cache(t: Trial) -> None:
    source = torch.bfloat16 if t.is_narrow else t.dtype
    for heads, head in ((2, 64), (3, 128)):
        k, v = (t.randn(6, heads, head, dtype=source) for _ in range(2))
        slots = t.shuffled(_SLOTS)[:6]
        slots[1] = -1
        caches = [torch.zeros(_PAGES, _PAGE_SIZE, heads, head).to(t.dtype) for _ in range(2)]
        scales = _scales(t, heads)
        got = [t.there(x) for x in caches]
        given = {name: t.there(x) for name, x in scales.items()}
        rk.store_kv_cache(t.there(k), t.there(v), *got, t.there(slots), **given)
        reference.store_kv_cache(k, v, *caches, slots, **scales)
        for one, other in zip([*got, *given.values()], [*caches, *scales.values()], strict=True):
            t.same(_no_negative_zero(one.cpu()), _no_negative_zero(other), EXACT)


def _scales(t: Trial, heads: int) -> dict[str, Any]:
    """What the cache's dtype asks for."""
    if t.dtype == torch.int8:
        return {name: torch.zeros(_PAGES, _PAGE_SIZE, heads) for name in ("k_scale", "v_scale")}
    if not t.is_narrow:
        return {}
    return {name: 0.01 + t.rand(heads) / 10 for name in ("k_scale", "v_scale")}


def _no_negative_zero(x: torch.Tensor) -> torch.Tensor:
    """FP8 of OCP has two zeros, and either may be stored."""
    if x.dtype != getattr(torch, "float8_e4m3fn", None):
        return x
    codes = x.view(torch.uint8)
    return torch.where(codes == 0x80, 0, codes)
