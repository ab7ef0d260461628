"""Latent attention as records of `Decoder`: the bits of the ops that they name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radix_kernels as rk
from radix_kernels import decoder as records
from tests.kernel.latent_records import PAGE, pack_heads, places, split
from tests.marks import needs_cpu_library

HEADS = 3
NOPE = 48
ROTARY = 16
LATENT = 32
VALUE = 80
SCALE = 0.17

pytestmark = needs_cpu_library


class Attention:
    """Records of latent attention over buffer 0, and what their ops leave, one after the other."""

    widths = (HEADS * (NOPE + ROTARY), LATENT, ROTARY, HEADS * VALUE)
    table = rk.rope_cos_sin_cache(ROTARY, 64, 1e4)

    def __init__(self, dtype: torch.dtype, rng: torch.Generator, *, kind: str = "dense") -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng).to(dtype) * shape[-1] ** -0.5

        self.dtype = dtype
        self.absorb = pack_heads(random(HEADS, LATENT, NOPE))
        self.values = pack_heads(random(HEADS, VALUE, LATENT))
        self.weight = random(HEADS * (NOPE + VALUE), LATENT)
        self.expand = rk.pack_weight(self.weight, kind=kind)

    def decoder(self, cache: torch.Tensor, is_neox: bool = False) -> rk.Decoder:
        q, latent, rope, out = split(*self.widths)
        store = records.LatentStoreOp(
            q=q,
            latent=latent,
            rope=rope,
            heads=HEADS,
            cache=cache,
            cos_sin_cache=self.table,
            is_neox=is_neox,
        )
        decode = records.LatentAttentionOp(
            q=q,
            out=out,
            cache=cache,
            softmax_scale=SCALE,
            absorb=self.absorb,
            values=self.values,
        )
        prefill = records.LatentPrefillOp(
            q=q, out=out, heads=HEADS, cache=cache, softmax_scale=SCALE, expand=self.expand
        )
        buffers = [(sum(self.widths), str(self.dtype).removeprefix("torch."))]
        return rk.Decoder(buffers, [store, decode, prefill])

    def run_ops(
        self,
        hidden: torch.Tensor,
        cache: torch.Tensor,
        where: dict[str, Any],
        expanded: int,
        is_neox: bool = False,
    ) -> None:
        q, latent, rope, out = hidden.split(self.widths, -1)
        q = q.unflatten(-1, (HEADS, -1))
        out = out.unflatten(-1, (HEADS, -1))
        rk.apply_rope_inplace(
            where["positions"],
            q[..., NOPE:],
            rope[:, None],
            ROTARY,
            self.table,
            is_neox=is_neox,
        )
        rk.store_mla_kv(latent, rope, cache, where["slot_mapping"])
        count = len(where["kv_lens"]) - expanded
        self._decode(q, out, cache, where, count)
        for entry in range(count, len(where["kv_lens"])):
            self._prefill(q, out, cache, where, entry)

    def _decode(self, q: Any, out: Any, cache: Any, where: dict[str, Any], count: int) -> None:
        tokens = int(where["cu_seqlens_q"][count])
        q = q[:tokens]
        seen = rk.mla_decode(
            rk.linear_heads(q[..., :NOPE], self.absorb),
            q[..., NOPE:],
            cache,
            where["page_table"][:count],
            where["kv_lens"][:count],
            where["cu_seqlens_q"][: count + 1],
            softmax_scale=SCALE,
        )
        rk.linear_heads(seen, self.values, out=out[:tokens])

    def _prefill(self, q: Any, out: Any, cache: Any, where: dict[str, Any], entry: int) -> None:
        """Each entry by itself."""
        begin, end = where["cu_seqlens_q"][entry : entry + 2].tolist()
        length = int(where["kv_lens"][entry])
        cu_k = torch.tensor([0, length]).int()
        cached = rk.gather_mla_kv(
            cache,
            where["page_table"][entry : entry + 1],
            cu_k,
            torch.empty(length, LATENT + ROTARY, dtype=self.dtype),
        )
        both = rk.linear(cached[:, :LATENT], self.expand, keep_x=True).unflatten(-1, (HEADS, -1))
        keys = torch.empty(length, HEADS, NOPE + ROTARY, dtype=self.dtype)
        rk.concat_mla_k(keys, both[..., :NOPE], cached[:, None, LATENT:])
        rk.flash_attn_varlen(
            q[begin:end],
            keys,
            both[..., NOPE:],
            torch.tensor([0, end - begin]).int(),
            cu_k,
            softmax_scale=SCALE,
            causal=True,
            out=out[begin:end],
        )


# New tokens and tokens in all of each row, and how many rows, the last ones, are un-absorbed.
STEPS = [
    ([1, 1, 1], [20, 3, 9], 0),
    ([1, 3, 2], [20, 3, 9], 0),
    ([1], [20], 0),
    ([7], [7], 1),
    ([1], [1], 1),
    ([5, 1, 9, 4], [5, 17, 30, 4], 4),
    ([1, 1, 11, 0, 3], [32, 1, 11, 8, 29], 3),
    ([2, 1, 0, 1, 13], [9, 30, 0, 1, 31], 2),
    ([1, 0], [6, 0], 1),
    ([], [], 0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_latent_attention(dtype: torch.dtype, is_neox: bool, step: Any, rng: Any) -> None:
    """Absorbed and un-absorbed rows of a step: the bits of the ops, whatever memory held before and
    what lies on pages and in slots that no row has."""
    query, kv, expanded = step
    where = places(query, kv, rng)
    model = Attention(dtype, rng)
    cache = full_cache(where, LATENT + ROTARY, dtype, rng)
    other = cache.clone()
    hidden = torch.randn(sum(query), sum(model.widths), generator=rng).to(dtype)
    hidden[:, -HEADS * VALUE :] = float("nan")
    expected = hidden.clone()
    decoder = model.decoder(cache, is_neox)
    decoder._workspace = torch.full((1 << 20,), 255, dtype=torch.uint8)  # NaN in every dtype
    longest = max(query, default=0)
    found = decoder(hidden, **where, max_seqlen_q=longest, num_expanded=expanded)
    assert found is hidden
    assert len(decoder._workspace) == 1 << 20

    model.run_ops(expected, other, where, expanded, is_neox)
    assert expected.isfinite().all()
    assert torch.equal(hidden, expected)
    assert torch.equal(cache.nan_to_num(), other.nan_to_num())


def full_cache(
    where: dict[str, Any], width: int, dtype: torch.dtype, rng: torch.Generator
) -> torch.Tensor:
    """Random in the slots that rows have, NaN elsewhere."""
    pages = 8 * max(1, len(where["kv_lens"]))
    cache = torch.full((pages, PAGE, width), float("nan"), dtype=dtype)
    for row, length in enumerate(where["kv_lens"].tolist()):
        at = torch.arange(length)
        slots = (where["page_table"][row, at // PAGE].long(), at % PAGE)
        cache[slots] = torch.randn(length, width, generator=rng).to(dtype)
    return cache


@pytest.mark.parametrize("heads", [1, 64, 129])
def test_many_heads(heads: int, rng: Any) -> None:
    """More than a call of another op has tensors. The first and the last head are heads alone."""
    where = places([1, 1], [5, 9], rng)
    cache = full_cache(where, 32, torch.float32, rng)
    absorb = torch.randn(heads, 16, 32, generator=rng)
    values = torch.randn(heads, 16, 16, generator=rng)
    data = torch.randn(2, heads * 64, generator=rng)

    def run(chosen: slice) -> torch.Tensor:
        number = len(absorb[chosen])
        q, out = split(number * 48, number * 16)
        record = records.LatentAttentionOp(
            q=q,
            out=out,
            cache=cache,
            softmax_scale=SCALE,
            absorb=pack_heads(absorb[chosen]),
            values=pack_heads(values[chosen]),
        )
        own = data[:, : heads * 48].unflatten(-1, (heads, -1))[:, chosen].flatten(1)
        hidden = torch.cat((own, torch.full((2, out.count), float("nan"))), -1)
        rk.Decoder([(number * 64, "float32")], [record])(hidden, **where)
        return hidden[:, out.first :]

    found = run(slice(None))
    assert found.isfinite().all()
    assert torch.equal(found[:, :16], run(slice(0, 1)))
    assert torch.equal(found[:, -16:], run(slice(heads - 1, None)))


@pytest.mark.parametrize("kind", ["dense", "int8"])
@pytest.mark.parametrize("expanded", [0, 1, 3])
def test_both_forms_are_attention(kind: str, expanded: int, rng: Any) -> None:
    """Beside float64 of the definition: heads' keys and values are products of the latent values,
    here with one weight for both forms."""
    query, kv = [1, 6, 3], [13, 6, 21]
    where = places(query, kv, rng)
    model = Attention(torch.float32, rng, kind=kind)
    weight = rk.linear(torch.eye(LATENT), model.expand).t().unflatten(0, (HEADS, -1))
    model.absorb = pack_heads(weight[:, :NOPE].transpose(1, 2))
    model.values = pack_heads(weight[:, NOPE:])
    cache = full_cache(where, LATENT + ROTARY, torch.float32, rng)
    hidden = torch.randn(sum(query), sum(model.widths), generator=rng)
    model.decoder(cache)(hidden, **where, num_expanded=expanded)

    q, _, _, out = hidden.double().split(model.widths, -1)
    for row, (count, length) in enumerate(zip(query, kv, strict=True)):
        at = torch.arange(length)
        seen = cache[where["page_table"][row, at // PAGE].long(), at % PAGE].double()
        begin = int(where["cu_seqlens_q"][row])
        hidden_keys = torch.ones(count, length).triu(length - count + 1).bool()
        for h in range(HEADS):
            own = q[begin : begin + count].unflatten(-1, (HEADS, -1))[:, h]
            both = seen[:, :LATENT] @ weight[h].double().t()
            keys = torch.cat((both[:, :NOPE], seen[:, LATENT:]), -1)
            scores = (own @ keys.t() * SCALE).masked_fill(hidden_keys, -torch.inf)
            exact = scores.softmax(-1) @ both[:, NOPE:]
            found = out[begin : begin + count].unflatten(-1, (HEADS, -1))[:, h]
            assert (found - exact).norm() / exact.norm() < 2e-6, (row, h)


def test_what_is_expanded_at_once_is_bounded(rng: Any) -> None:
    """Several rows together take 64 MiB, a longer row what it takes; the bits are those of rows by
    themselves."""
    heads = 16
    nope = 240
    value = 256
    latent = 16
    rotary = 16
    token_bytes = 4 * heads * (nope + value + nope + rotary)
    most = (64 << 20) // token_bytes
    page = 64
    q, out = split(heads * (nope + rotary), heads * value)
    weight = torch.randn(heads * (nope + value), latent, generator=rng)
    cache = torch.randn(3 * most // page + 3, page, latent + rotary, generator=rng)
    record = records.LatentPrefillOp(
        q=q, out=out, heads=heads, cache=cache, softmax_scale=0.1, expand=rk.pack_weight(weight)
    )

    def run(lengths: list[int], rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        decoder = rk.Decoder([(q.count + out.count, "float32")], [record])
        hidden = torch.cat((rows, torch.full((len(rows), out.count), float("nan"))), -1)
        table = torch.arange(len(cache)).int().repeat(len(lengths), 1)
        decoder(
            hidden,
            torch.zeros(len(rows)).int(),
            torch.full((len(rows),), -1),
            table,
            torch.tensor(lengths).int(),
            torch.arange(0, len(rows) + 1, 2).int(),
            num_expanded=len(lengths),
        )
        assert hidden.isfinite().all()
        return hidden[:, out.first :], len(decoder._workspace)

    lengths = [most // 2, most // 2 - 1, most // 3, most + 100, 5, 7]
    rows = torch.randn(2 * len(lengths), q.count, generator=rng)
    found, size = run(lengths, rows)
    for i, length in enumerate(lengths):
        alone, _ = run([length], rows[2 * i : 2 * i + 2])
        assert torch.equal(found[2 * i : 2 * i + 2], alone), length
    allowed = (latent + rotary) * 4 * (most + 100) + 8192
    assert 0 <= size - token_bytes * (most + 100) <= allowed
    _, size = run(lengths[:3], rows[:6])
    assert 0 <= size - token_bytes * (most - 1) <= allowed
