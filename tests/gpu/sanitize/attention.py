"""Prefill and decode over pages, and MLA's decode."""

from __future__ import annotations

from typing import Any

import torch

import radix_kernels as rk
from tests.gpu.sanitize.compare import FP8, HALF, compare, on_gpu
from tests.kernel.attention_cases import make_case


def paged(
    name: str,
    rows: list[tuple[int, int]],
    hint: int,
    allowed: float,
    fp8: str = "",
    dtype: torch.dtype = HALF,
    options: dict[str, Any] | None = None,
    **sizes: Any,
) -> None:
    """One call over pages against the reference. hint: max_seqlen_q; fp8: "", "cache" or "all"."""
    rng = torch.Generator().manual_seed(0)
    case = make_case(rows, rng, dtype=dtype, **sizes)
    options = dict(options or {})
    if options.get("sinks"):
        options["sinks"] = torch.randn(case.q.shape[1], generator=rng)
    scales = {}
    if fp8:
        case.k_cache = case.k_cache.to(FP8)
        case.v_cache = case.v_cache.to(FP8)
        scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
    if fp8 == "all":
        case.q = case.q.to(FP8)
        scales["q_scale"] = torch.tensor([0.75])
    options |= scales
    expected = rk.reference.flash_attn_with_kvcache(*case.args, **options)
    there = [on_gpu(x) for x in case.args]
    options_there = {key: on_gpu(value) for key, value in options.items()}
    got = rk.flash_attn_with_kvcache(*there, **options_there, max_seqlen_q=hint)
    compare(name, got, expected, allowed)


# What the kernels have branches of their own for.
OPTIONS: dict[str, dict[str, Any]] = {
    "a window": {"window_size": (100, 0)},
    "a cap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "all keys": {"causal": False},
}


def prefill() -> None:
    """Heads of 64 to 256, one block and pairs of them, gathered pages, FP8, all options."""
    rows = [(150, 300), (5, 40), (0, 3)]
    hint = 150
    paged("prefill, a pair of blocks", rows, hint, 5e-3, heads=(4, 2), dim=128)
    paged("prefill, one block", rows, 30, 5e-3, heads=(4, 2), dim=128, page_size=4)
    paged("prefill of 64", rows, hint, 5e-3, heads=(4, 2), dim=64)
    paged("prefill of 192 and 128", rows, hint, 5e-3, heads=(2, 2), dim=192, v_dim=128)
    paged("prefill of 256", rows, hint, 5e-3, heads=(2, 2), dim=256)
    paged("prefill in FP8, a pair of blocks", rows, hint, 4e-2, "all", heads=(4, 2), dim=128)
    paged("prefill in FP8, one block", rows, 30, 4e-2, "all", heads=(4, 2), dim=128, page_size=4)
    paged("prefill of 64 in FP8", rows, hint, 4e-2, "all", heads=(4, 2), dim=64)
    paged("prefill of 192", rows, hint, 5e-3, heads=(2, 2), dim=192)
    for dim, v_dim in ((64, 64), (192, 128), (192, 192), (256, 256)):
        name = f"prefill of {dim} and {v_dim}, gathered"
        paged(name, rows, 30, 5e-3, heads=(2, 2), dim=dim, v_dim=v_dim, page_size=4)
    for name, options in OPTIONS.items():
        paged(f"prefill with {name}", rows, hint, 5e-3, options=options, heads=(4, 2), dim=128)
        fp8 = f"prefill in FP8 with {name}"
        paged(fp8, rows, hint, 4e-2, "all", options=options, heads=(4, 2), dim=128)
    for dim, page in ((64, 16), (128, 16), (128, 4), (256, 16)):
        sizes: dict[str, Any] = {"heads": (4, 2), "dim": dim, "page_size": page}
        paged(f"prefill of {dim} in float16", rows, hint, 1e-3, dtype=torch.float16, **sizes)
    for dim in (64, 128):  # a block has one tile after the other
        paged(f"prefill of {dim}, many heads", rows, hint, 5e-3, heads=(80, 80), dim=dim)


def decode() -> None:
    """As prefill: few queries a row, FP8 caches, parts of long rows that are joined."""
    rows = [(1, 700), (1, 40), (1, 1)]
    paged("decode", rows, 1, 5e-3, heads=(8, 2), dim=128)
    single: dict[str, Any] = {"heads": (20, 2), "dim": 128, "page_size": 1}
    paged("decode of two tokens, one a page", [(2, 530), (2, 20)], 2, 5e-3, **single)
    paged("decode of 64", rows, 1, 5e-3, heads=(8, 2), dim=64)
    paged("decode of 256", rows, 1, 5e-3, heads=(8, 2), dim=256)
    paged("decode of an FP8 cache", rows, 1, 5e-3, "cache", heads=(8, 2), dim=128)
    for dim, dtype in (
        (64, HALF),
        (256, HALF),
        (64, torch.float16),
        (128, torch.float16),
        (256, torch.float16),
    ):
        for queries in (1, 9):  # one tile of rows, and two
            name = f"decode of {queries} tokens, an FP8 cache of {dim}, {dtype}"
            several = [(queries, 700), (queries, 40)]
            paged(name, several, queries, 5e-3, "cache", dtype, heads=(8, 2), dim=dim)
    for dim in (64, 128, 256):
        name = f"decode of {dim} in float16"
        paged(name, rows, 1, 1e-3, dtype=torch.float16, heads=(8, 2), dim=dim)
    for name, options in OPTIONS.items():
        for kind, fp8 in (("decode", ""), ("decode of an FP8 cache", "cache")):
            title = f"{kind} with {name}"
            paged(title, rows, 1, 5e-3, fp8, options=options, heads=(8, 2), dim=128)
    long = [(1, 513)] * 3 + [(1, 2000)]
    for dim in (128, 256):  # so many KV heads that a block has several chunks, one after the other
        paged(f"decode of {dim} in long runs", long, 1, 5e-3, heads=(264, 66), dim=dim)


def mla() -> None:
    """Few heads and many, few rows and more, rows of one length, parts joined by one group of
    threads and by all, boxes and tokens."""
    for heads, page, lens, fp8 in (
        (16, 64, (300, 17), False),
        (128, 64, (300, 17), False),
        (16, 64, (300, *[17] * 64), False),
        (16, 64, (2200, *[17] * 64), False),
        (16, 64, (2700, 17), False),
        (20, 64, (2700, 17), False),
        (16, 64, (1400, *[17] * 16), False),
        (16, 64, (700, *[17] * 32), False),
        (128, 64, (2200, 17), False),
        (80, 1, (530, 17), False),
        (16, 1, (530, 17), False),
        (16, 1, (530, *[17] * 64), False),
        (16, 64, (600, 600), False),
        (16, 64, (270,) * 65, False),
        (64, 64, (600, 600), False),
        (64, 64, (600, 600), True),
        (16, 64, (300, 17), True),
        (128, 64, (300, 17), True),
        (128, 64, (2200, 17), True),
        (80, 1, (530, 17), True),
    ):
        mla_rows(heads, page, lens, fp8)
    for heads in (16, 20):  # one tile of rows, and two
        for fp8, dtype in ((False, HALF), (True, HALF), (False, torch.float16)):
            mla_rows(heads, 64, (1100, 17), fp8, dtype, batch_invariant=True)
            mla_rows(heads, 1, (530, 17), fp8, dtype, batch_invariant=True)
    for heads in (16, 64, 128):
        mla_rows(heads, 64, (2200, 17), False, torch.float16)
    for lens in ((2200, *[17] * 64), (1400, *[17] * 16), (700, *[17] * 32)):
        mla_rows(16, 64, lens, False, torch.float16)


def mla_rows(
    heads: int,
    page: int,
    lens: tuple[int, ...],
    fp8: bool,
    dtype: torch.dtype = HALF,
    **options: Any,
) -> None:
    """One call of MLA's decode for rows of one query each."""
    rng = torch.Generator().manual_seed(0)
    rows = len(lens)
    q, rope = (torch.randn(rows, heads, d, generator=rng).to(dtype) for d in (512, 64))
    needed = [-(-n // page) for n in lens]
    cache = torch.randn(sum(needed) + 2, page, 576, generator=rng).to(dtype)
    if fp8:
        cache = rk.reference.pack_mla_tokens(cache[..., :512], cache[..., 512:])
    free = torch.randperm(len(cache), generator=rng).to(torch.int32)
    own = free[: sum(needed)].split(needed)
    table = torch.stack([pages.repeat(max(needed))[: max(needed)] for pages in own])
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32)
    args = (q, rope, cache, table, kv_lens, cu_seqlens_q)
    expected = rk.reference.mla_decode(*args, softmax_scale=192**-0.5)
    there = [on_gpu(x) for x in args]
    got = rk.mla_decode(*there, softmax_scale=192**-0.5, max_seqlen_q=1, **options)
    kind = ""
    if fp8:
        kind = " in FP8"
    elif dtype != HALF:
        kind = " in float16"
    if options:
        kind += ", batch_invariant"
    counts = f"{lens[:2]} of {rows} rows" if rows > 2 else lens
    name = f"mla_decode, {heads} heads, {counts} tokens in pages of {page}{kind}"
    compare(name, got, expected, 1e-2 if fp8 else 5e-3)
