"""Attention over pages and over whole sequences, its merge, and multi-head latent attention."""

from __future__ import annotations

from typing import Any

import torch

from .bounds import ATTENTION, ATTENTION_FP8, EXACT, LSE, LSE_FP8, LSE_MLA, ROUNDED_ONCE
from .trial import Trial, case, reference, rk

_PAGE_SIZE = 16
_LATENT = 512
_ROTARY = 64
# Lengths of keys and of new queries by row: decode, a whole prompt, a chunk of one, both in one.
_BATCHES = (
    ([1, 40, 200], [1, 1, 1]),
    ([33, 70], [33, 7]),
    ([17, 129, 64], [1, 20, 64]),
)
_NO_PAGE = 2**30  # in a table, past a row's pages


@case
def flash_attn_with_kvcache(t: Trial) -> None:
    for lens, queries in _BATCHES:
        for heads, head in (((4, 2), 64), ((8, 1), 128)):
            _paged(t, lens, queries, heads, head)


def _paged(
    t: Trial, lens: list[int], queries: list[int], heads: tuple[int, int], head: int
) -> None:
    table, pages = _tables(t, lens)
    shape = (pages, _PAGE_SIZE, heads[1], head)
    caches = []
    scales: dict[str, Any] = {}
    for name in ("k_scale", "v_scale"):
        cache, scale = _cache(t, shape)
        caches.append(cache)
        if scale is not None:
            scales[name] = scale
    q = t.randn(sum(queries), heads[0], head, dtype=torch.float32 if t.name == "int8" else None)
    if t.is_narrow and t.name != "int8":
        q = q.to(torch.bfloat16)
    rows = [torch.tensor(lens, dtype=torch.int32), _starts(queries)]
    out = t.poisoned(*q.shape, dtype=q.dtype)
    given = {name: t.there(x) for name, x in scales.items()}
    got = rk.flash_attn_with_kvcache(
        *(t.there(x) for x in (q, *caches, table, *rows)),
        **given,
        max_seqlen_q=max(queries),
        return_softmax_lse=True,
        out=out,
    )
    exact = reference.flash_attn_with_kvcache(
        q.double(), *map(_wide, caches), table, *rows, **scales, return_softmax_lse=True
    )
    _compare(t, got, exact, q.dtype)


def _cache(t: Trial, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys or values in the trial's dtype, and their scales where it has some."""
    values = t.randn(*shape, dtype=torch.float32)
    if t.name == "int8":
        codes, scale = reference.kv_cache.quantize(values.flatten(0, 1))
        return codes.view(shape), scale.view(shape[:3])
    if t.is_narrow:
        return values.to(t.dtype), 0.5 + t.rand(shape[2])
    return values.to(t.dtype), None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """float64, but for dtypes that scales belong to."""
    return x.double() if x.is_floating_point() and x.element_size() > 1 else x


def _compare(t: Trial, got: Any, exact: Any, dtype: torch.dtype) -> None:
    name = str(dtype).rpartition(".")[2]
    is_fp8 = t.is_narrow and t.name != "int8"
    t.near(got[0], exact[0], ATTENTION_FP8 if is_fp8 else ATTENTION[name])
    t.near(got[1], exact[1], LSE_FP8 if is_fp8 else LSE)


def _tables(t: Trial, lens: list[int]) -> tuple[torch.Tensor, int]:
    """A page table in which rows share no page, and the number of pages."""
    counts = [-(-n // _PAGE_SIZE) for n in lens]
    pages = sum(counts) + 1
    order = t.shuffled(pages).int()
    table = torch.full((len(lens), max(counts) + 1), _NO_PAGE, dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[first : first + count]
        first += count
    return table, pages


def _starts(lens: list[int]) -> torch.Tensor:
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(lens).cumsum(0)
    return starts


@case
def flash_attn_varlen(t: Trial) -> None:
    dtype = torch.bfloat16 if t.is_narrow else t.dtype
    for lens, causal in (([1, 30, 65], True), ([129], True), ([20, 7], False)):
        starts = _starts(lens)
        tensors = [t.randn(sum(lens), heads, 64).to(t.dtype) for heads in (4, 2, 2)]
        scales: dict[str, Any] = {}
        if t.is_narrow:
            scales = {name: torch.tensor([0.7]) for name in ("q_scale", "k_scale", "v_scale")}
        given = {name: t.there(x) for name, x in scales.items()}
        got = rk.flash_attn_varlen(
            *(t.there(x) for x in (*tensors, starts, starts)),
            **given,
            causal=causal,
            max_seqlen_q=max(lens),
            return_softmax_lse=True,
        )
        exact = reference.flash_attn_varlen(
            *map(_wide, tensors), starts, starts, **scales, causal=causal, return_softmax_lse=True
        )
        _compare(t, got, exact, dtype)


@case
def merge_state(t: Trial) -> None:
    for tokens, heads, head in ((1, 1, 64), (9, 4, 128)):
        outs = [t.randn(tokens, heads, head) for _ in range(2)]
        lses = [t.randn(tokens, heads, dtype=torch.float32) * 4 for _ in range(2)]
        lses[0][0, 0] = -float("inf")
        out = t.poisoned(tokens, heads, head)
        lse = t.poisoned(tokens, heads, dtype=torch.float32)
        there = [t.there(x) for x in (outs[0], lses[0], outs[1], lses[1])]
        rk.merge_state(*there, out=out, lse=lse)
        exact = reference.merge_state(
            outs[0].double(), lses[0].double(), outs[1].double(), lses[1].double()
        )
        t.near(out, exact[0], ROUNDED_ONCE[t.name])
        t.near(lse, exact[1], LSE)


@case
def mla_decode(t: Trial) -> None:
    for lens, queries, heads in (([1, 50, 130], [1, 1, 1], 16), ([40, 21], [3, 1], 8)):
        table, pages = _tables(t, lens)
        cache = t.randn(pages, _PAGE_SIZE, _LATENT + _ROTARY)
        q = [t.randn(sum(queries), heads, width) for width in (_LATENT, _ROTARY)]
        rows = [torch.tensor(lens, dtype=torch.int32), _starts(queries)]
        scale = (128 + _ROTARY) ** -0.5
        got = rk.mla_decode(
            *(t.there(x) for x in (*q, cache, table, *rows)),
            softmax_scale=scale,
            max_seqlen_q=max(queries),
            return_softmax_lse=True,
        )
        exact = reference.mla_decode(
            *(x.double() for x in (*q, cache)),
            table,
            *rows,
            softmax_scale=scale,
            return_softmax_lse=True,
        )
        t.near(got[0], exact[0], ATTENTION[t.name])
        t.near(got[1], exact[1], LSE_MLA)


@case
def store_mla_kv(t: Trial) -> None:
    tokens = 7
    latent = t.randn(tokens, _LATENT)
    rotary = t.randn(tokens, _ROTARY)
    slots = t.shuffled(3 * _PAGE_SIZE)[:tokens]
    slots[3] = -1
    cache = t.randn(3, _PAGE_SIZE, _LATENT + _ROTARY)
    got = t.there(cache)
    rk.store_mla_kv(t.there(latent), t.there(rotary), got, t.there(slots))
    reference.store_mla_kv(latent, rotary, cache, slots)
    t.same(got, cache, EXACT)


@case
def gather_mla_kv(t: Trial) -> None:
    lens = [5, 40, 1]
    table, pages = _tables(t, lens)
    cache = t.randn(pages, _PAGE_SIZE, _LATENT + _ROTARY)
    starts = _starts(lens)
    out = t.poisoned(sum(lens), _LATENT + _ROTARY)
    rk.gather_mla_kv(t.there(cache), t.there(table), t.there(starts), out)
    expected = torch.empty(sum(lens), _LATENT + _ROTARY, dtype=t.dtype)
    t.same(out, reference.gather_mla_kv(cache, table, starts, expected), EXACT)


@case
def concat_mla_k(t: Trial) -> None:
    for tokens, heads in ((1, 1), (9, 16)):
        parts = [t.randn(tokens, heads, 128), t.randn(tokens, 1, _ROTARY)]
        out = t.poisoned(tokens, heads, 128 + _ROTARY)
        rk.concat_mla_k(out, *(t.there(x) for x in parts))
        expected = torch.empty(tokens, heads, 128 + _ROTARY, dtype=t.dtype)
        reference.concat_mla_k(expected, *parts)
        t.same(out, expected, EXACT)
