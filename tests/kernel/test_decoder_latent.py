"""Latent attention, a gated sum and scaled weights of a router as records of `Decoder`: the bits of
the ops that they name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _loader
from radix_kernels import decoder as records

HEADS = 3
NOPE = 24
ROTARY = 16
LATENT = 48
PAGE = 4
EPS = 1e-5

pytestmark = pytest.mark.skipif(_loader.backend != "cpu", reason="no native CPU library")


def split(*sizes: int) -> list[records.Columns]:
    """Neighbouring columns of buffer 0."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        records.Columns(buffer=0, first=first, count=count)
        for first, count in zip(starts, sizes, strict=True)
    ]


def places(query: list[int], kv: list[int], rng: torch.Generator) -> dict[str, Any]:
    """Rows with so many new tokens, and tokens in all, on shuffled pages; pages that a row does not
    have are not there."""
    pages = torch.full((len(kv), 8), 2**30, dtype=torch.int32)
    order = torch.randperm(8 * len(kv), generator=rng).int()
    for row, length in enumerate(kv):
        count = -(-length // PAGE)
        pages[row, :count] = order[8 * row : 8 * row + count]
    positions = torch.cat([torch.arange(n - q, n) for q, n in zip(query, kv, strict=True)])
    rows = torch.repeat_interleave(torch.arange(len(kv)), torch.tensor(query))
    slots = pages[rows, positions // PAGE].long() * PAGE + positions % PAGE
    return {
        "positions": positions.int(),
        "slot_mapping": slots,
        "page_table": pages,
        "kv_lens": torch.tensor(kv).int(),
        "cu_seqlens_q": torch.tensor([0, *query]).cumsum(0).int(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("query", [[1, 1, 1], [1, 3, 2], [1]], ids=str)
def test_latent_attention(dtype: torch.dtype, is_neox: bool, query: list[int], rng: Any) -> None:
    kv = [20, 3, 9][: len(query)]
    where = places(query, kv, rng)
    widths = (HEADS * (NOPE + ROTARY), LATENT, ROTARY, HEADS * LATENT, HEADS * LATENT)
    q, latent, rope, q_latent, out = split(*widths)
    cache = torch.randn(8 * len(kv), PAGE, LATENT + ROTARY, generator=rng).to(dtype)
    table = rk.rope_cos_sin_cache(ROTARY, 64, 1e4)
    program = [
        records.LatentStoreOp(
            q=q,
            latent=latent,
            rope=rope,
            heads=HEADS,
            cache=cache,
            cos_sin_cache=table,
            is_neox=is_neox,
        ),
        records.LatentAttentionOp(
            q_latent=q_latent, q=q, out=out, heads=HEADS, cache=cache, softmax_scale=0.17
        ),
    ]
    decoder = rk.Decoder([(sum(widths), str(dtype).removeprefix("torch."))], program)
    hidden = torch.randn(sum(query), sum(widths), generator=rng).to(dtype)
    hidden[:, out.first :] = float("nan")
    expected = hidden.clone()
    other = cache.clone()
    longest = max(query)
    assert decoder(hidden, **where, max_seqlen_q=longest) is hidden

    parts = list(expected.split(widths, -1))
    heads = parts[0].view(len(hidden), HEADS, -1)[..., NOPE:]
    rk.apply_rope_inplace(
        where["positions"], heads, parts[2][:, None], ROTARY, table, is_neox=is_neox
    )
    rk.store_mla_kv(parts[1], parts[2], other, where["slot_mapping"])
    rk.mla_decode(
        parts[3].unflatten(-1, (HEADS, -1)),
        heads,
        other,
        where["page_table"],
        where["kv_lens"],
        where["cu_seqlens_q"],
        softmax_scale=0.17,
        max_seqlen_q=longest,
        out=parts[4].unflatten(-1, (HEADS, -1)),
    )
    assert expected.isfinite().all()
    assert torch.equal(hidden, expected)
    assert torch.equal(cache, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 37, 256])
def test_a_gated_sum(dtype: torch.dtype, size: int, rng: Any) -> None:
    """hidden += norm(hidden) * sigmoid(gate of it), in float32, rounded once."""
    name = str(dtype).removeprefix("torch.")
    norm = torch.randn(size, generator=rng).to(dtype)
    gate = rk.pack_weight(torch.randn(1, size, generator=rng).to(dtype))
    buffers = [(size, name), (size, name), (1, name), (1, "float32"), (1, "int32")]
    hidden, x, logits, weights, ids = (
        records.Columns(buffer=number, first=0, count=count)
        for number, (count, _) in enumerate(buffers)
    )
    program = [
        records.NormOp(x=hidden, out=x, weight=norm, eps=EPS),
        records.LinearOp(x=x, out=logits, weight=gate),
        records.RouteOp(
            logits=logits, weights=weights, ids=ids, router="sigmoid", renormalize=False
        ),
        records.AddOp(to=0, x=1, scale=weights),
    ]
    data = torch.randn(7, size, generator=rng).to(dtype)
    normed = rk.rmsnorm(data, norm, EPS)
    counts, _ = rk.topk_sigmoid(rk.linear(normed, gate), 1)
    assert torch.allclose(counts, rk.linear(normed, gate).float().sigmoid(), rtol=1e-5)
    expected = (data + normed * counts).to(dtype)
    assert torch.equal(rk.Decoder(buffers, program)(data, **places([7], [7], rng)), expected)


def test_weights_of_a_softmax_are_scaled(rng: Any) -> None:
    buffers = [(5, "float32"), (3, "float32"), (3, "int32")]
    logits, weights, ids = (
        records.Columns(buffer=number, first=0, count=count)
        for number, (count, _) in enumerate(buffers)
    )
    route = records.RouteOp(
        logits=logits, weights=weights, ids=ids, router="softmax", renormalize=False, scaling=2.5
    )
    last = records.Columns(buffer=1, first=2, count=1)
    data = torch.randn(4, 5, generator=rng)
    expected, _ = rk.topk_softmax(data, 3, renormalize=False)
    expected = data + data * (expected[:, 2:] * 2.5)
    program = [route, records.AddOp(to=0, x=0, scale=last)]
    assert torch.equal(rk.Decoder(buffers, program)(data, **places([4], [4], rng)), expected)


def record(**change: Any) -> Any:
    q, q_latent, out = split(2 * (4 + 16), 2 * 16, 2 * 16)
    given = {"q_latent": q_latent, "q": q, "out": out, "heads": 2, "softmax_scale": 1.0}
    return records.LatentAttentionOp(**{**given, "cache": torch.zeros(2, PAGE, 32), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "are not 0 heads"),
        ({"heads": 5}, "are not 5 heads"),
        ({"cache": torch.zeros(2, PAGE, 16)}, "of a cache of 16 values"),
        ({"cache": torch.zeros(2, PAGE, 64)}, "are not 2 heads of 48 or more"),
        ({"cache": torch.zeros(2, 32)}, "kv_cache"),
        ({"cache": torch.zeros(2, PAGE, 32, dtype=torch.bfloat16)}, "kv_cache"),
    ],
)
def test_refusals(change: dict[str, Any], message: str, rng: Any) -> None:
    decoder = rk.Decoder([(104, "float32")], [record(**change)])
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        decoder(torch.zeros(1, 104), **places([1], [1], rng))


def test_a_scale_is_one_float32_column(rng: Any) -> None:
    for buffers, scale in (
        ([(8, "bfloat16")], records.Columns(buffer=0, first=0, count=1)),
        ([(8, "float32")], records.Columns(buffer=0, first=0, count=2)),
    ):
        decoder = rk.Decoder(buffers, [records.AddOp(to=0, x=0, scale=scale)])
        hidden = torch.zeros(1, 8, dtype=getattr(torch, buffers[0][1]))
        with pytest.raises((ValueError, TypeError), match="scale of an add"):
            decoder(hidden, **places([1], [1], rng))
