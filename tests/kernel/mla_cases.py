"""MLA decode problems over a poisoned cache and an oracle, shared by the native and the Triton
tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

import radix_kernels as rk
from tests.kernel.helpers import ATTENTION, assert_close, guarded, spread

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
LATENT = 512
ROPE = 64
SCALE = 192**-0.5


@dataclass
class Case:
    """Rows of (q_len, kv_len) over a paged cache that is NaN wherever nothing may read."""

    args: tuple[torch.Tensor, ...]
    tokens: list[torch.Tensor]  # of each row, [kv_len, latent + rope], as the cache holds them

    @property
    def fp8(self) -> bool:
        return self.args[2].dtype == torch.uint8


def split(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens[..., :LATENT], tokens[..., LATENT:]


def make_case(
    rows: list[tuple[int, int]],
    rng: torch.Generator,
    *,
    heads: int = 4,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    fp8: bool = False,
    gap: int = 0,
    latent: int = LATENT,
    rope: int = ROPE,
) -> Case:
    needed = [-(-kv // page_size) for _, kv in rows]
    pages = sum(needed) + 3
    cache = torch.full((pages, page_size, latent + rope), math.nan, dtype=dtype)
    if fp8:
        cache = torch.full((pages, page_size, 656), 255, dtype=torch.uint8)
    table = torch.full((len(rows), max([*needed, 0]) + 2), 2**30, dtype=torch.int32)
    free = torch.randperm(pages, generator=rng)
    tokens = []
    for row, (_, kv) in enumerate(rows):
        mine = free[: needed[row]]
        free = free[needed[row] :]
        table[row, : needed[row]] = mine.to(torch.int32)
        values = spread((kv, latent + rope), dtype, rng)
        stored = rk.reference.pack_mla_tokens(*split(values.to(torch.bfloat16))) if fp8 else values
        at = torch.arange(kv)
        cache[mine[at // page_size], at % page_size] = stored
        tokens.append(rk.reference.unpack_mla_cache(stored, torch.float64))
    count = sum(n for n, _ in rows)
    starts = torch.tensor([0, *(n for n, _ in rows)]).cumsum(0).to(torch.int32)
    lens = torch.tensor([kv for _, kv in rows], dtype=torch.int32)
    q = (
        spread((count, heads, latent), dtype, rng, gap=gap),
        spread((count, heads, rope), dtype, rng, gap=gap),
    )
    return Case((*q, cache, table, lens, starts), tokens)


def amplitude(case: Case, causal: bool = True) -> Callable[[], torch.Tensor]:
    """Sums of probabilities times the magnitudes of values: what rounding the probabilities is
    relative to."""
    return lambda: oracle(case, causal, magnitudes=True)[0]


def oracle(
    case: Case, causal: bool = True, magnitudes: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Straight from the definition, a query at a time. magnitudes: of the values."""
    nope, rope, *_, starts = case.args
    q = torch.cat((nope, rope), -1).double()
    out = torch.zeros(nope.shape, dtype=torch.float64)
    lse = torch.full(nope.shape[:2], -math.inf, dtype=torch.float64)
    for row, tokens in enumerate(case.tokens):
        n = int(starts[row + 1] - starts[row])
        for i in range(n):
            seen = tokens[: max(0, len(tokens) - n + i + 1)] if causal else tokens
            if not len(seen):
                continue
            at = int(starts[row]) + i
            scores = q[at] @ seen.T * SCALE
            lse[at] = torch.logsumexp(scores, -1)
            values = seen[:, : nope.shape[-1]]
            out[at] = torch.softmax(scores, -1) @ (values.abs() if magnitudes else values)
    return out, lse


def check(
    case: Case, causal: bool = True, batch_invariant: bool = False, hint: int | None = None
) -> None:
    """One call, and the reference, against the definition. hint: max_seqlen_q, of the rows."""
    exact, exact_lse = oracle(case, causal)
    expected = exact
    expected_lse = exact_lse
    dtype = case.args[0].dtype
    if rounds(case, batch_invariant):
        expected, expected_lse = oracle(rounded(case), causal)
    if hint is None:
        hint = int(case.args[-1].diff().max())
    out = guarded(tuple(case.args[0].shape), dtype, gap=8)
    got, lse = rk.mla_decode(
        *case.args,
        softmax_scale=SCALE,
        causal=causal,
        return_softmax_lse=True,
        out=out.view,
        max_seqlen_q=hint,
        batch_invariant=batch_invariant,
    )
    assert got is out.view
    out.check()
    assert_close("mla_decode", got, expected, ATTENTION[dtype], amplitude(case, causal))
    assert_close("mla_decode lse", lse, expected_lse, (4e-6, 3e-5))
    defined, defined_lse = rk.reference.mla_decode(
        *(x.double() for x in case.args[:2]),
        *case.args[2:],
        softmax_scale=SCALE,
        causal=causal,
        return_softmax_lse=True,
    )
    assert_close("reference.mla_decode", defined, exact, (1e-12, 1e-10))
    assert_close("reference.mla_decode lse", defined_lse, exact_lse, (1e-12, 1e-10))


def rounds(case: Case, batch_invariant: bool = False) -> bool:
    """Whether FP8 values times their scales are rounded to q's type: in Triton, and on Hopper with
    more than 16 query rows, where Triton serves float16 queries."""
    impl = rk.capabilities()["ops"]["mla_decode"]["bfloat16"]["impl"]
    rows = case.args[0].shape[1] * int(case.args[-1].diff().max())
    narrow = (
        impl.startswith("cuda:")
        and case.args[0].dtype == torch.bfloat16
        and (batch_invariant or rows <= 16)
    )
    return case.fp8 and impl != "reference" and not impl.startswith("cpu") and not narrow


def rounded(case: Case) -> Case:
    return Case(case.args, [x.float().to(case.args[0].dtype).double() for x in case.tokens])
