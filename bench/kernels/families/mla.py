"""Multi-head latent attention: decode over the latent cache, storing its tokens, joining the full
keys of a prefill."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import radix_kernels as rk

from .. import peers
from ..harness import DECODE_BYTES, ROTATED_BYTES, Case, Contender, randn
from .attention_decode import WORKSPACE, PagedRows, paged_rows

_LATENT = 512
_ROPE = 64
_NOPE = 128
_SCALE = (_NOPE + _ROPE) ** -0.5


def mla(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Storing latent tokens, joining keys, and decode: small on the CPU, as served on a GPU."""
    for tokens in (1, 64, 4096):
        yield _store(device, dtype, tokens, fp8=False)
        yield _store(device, dtype, tokens, fp8=True)
    for fp8 in (False, True):
        if not fp8 or dtype == torch.bfloat16:
            yield _gather(device, dtype, [4096] * 4, fp8=fp8)
    yield _concat(device, dtype, 4096, 128)
    if device.type != "cuda":
        yield _decode(device, dtype, [1024], "B1 kv1024", 16, 16)
        yield _decode(device, dtype, [4096] * 8, "B8 kv4096", 16, 16)
        yield _decode(device, dtype, [1024], "B1 kv1024", 16, 128)
        return
    for batch, length, page, heads in (
        (64, 4096, 64, 128),
        (128, 4096, 64, 128),
        (1, 8192, 64, 128),
        (64, 4096, 1, 128),
        (64, 4096, 64, 64),
        (64, 4096, 64, 16),
        (64, 4096, 1, 16),
        (1, 8192, 64, 16),
        (1, 600, 16, 16),
        (4, 600, 16, 16),
        (16, 600, 16, 16),
        (32, 600, 16, 16),
        (64, 600, 16, 16),
        (16, 4096, 64, 16),
        (32, 4096, 64, 16),
        (1, 600, 16, 20),
        (1, 8192, 64, 32),
        (8, 4096, 64, 32),
        (256, 1024, 64, 16),
    ):
        yield _decode(device, dtype, [length] * batch, f"B{batch} kv{length}", page, heads)
    lengths = random.Random(0)
    ragged = [lengths.randint(100, 8192) for _ in range(64)]
    for heads in (16, 128):
        yield _decode(device, dtype, ragged, "B64 kv100..8192", 64, heads)
    for batch, shortest, longest, page in (
        (16, 100, 8192, 64),
        (32, 100, 8192, 64),
        (64, 500, 700, 16),
    ):
        ragged = [lengths.randint(shortest, longest) for _ in range(batch)]
        yield _decode(device, dtype, ragged, f"B{batch} kv{shortest}..{longest}", page, 16)
    for heads in (16, 128):
        yield _decode(device, dtype, [4096] * 64, "B64 kv4096", 64, heads, fp8=True)
    yield _decode(device, dtype, [4096] * 64, "B64 kv4096", 64, 16, batch_invariant=True)


def _decode(
    device: torch.device,
    dtype: torch.dtype,
    lengths: Sequence[int],
    name: str,
    page: int,
    heads: int,
    fp8: bool = False,
    batch_invariant: bool = False,
) -> Case:
    rows = paged_rows(device, lengths, page)
    batch = len(lengths)

    def make() -> tuple[torch.Tensor, ...]:
        q = randn(batch, heads, _LATENT + _ROPE, device=device, dtype=dtype)
        kv = randn(rows.num_pages, page, _LATENT + _ROPE, device=device, dtype=dtype)
        if fp8:
            kv = rk.reference.pack_mla_tokens(kv[..., :_LATENT], kv[..., _LATENT:])
        # FlashMLA takes q in one piece, the others in two.
        return q[:, None], q[..., :_LATENT].contiguous(), q[..., _LATENT:].contiguous(), kv

    contenders: dict[str, Contender] = {"radix": _radix(rows, batch_invariant)}
    flash = peers.load("vllm.v1.attention.ops.flashmla")
    if flash and page == 64 and not fp8:
        contenders["FlashMLA"] = _flash_mla(flash, rows, heads)
    flashinfer = peers.load("flashinfer")
    if flashinfer and not fp8:
        contenders["flashinfer fa3"] = _flashinfer(flashinfer, rows, heads, dtype)
    label = f"{name} page {page} {heads} heads"
    if fp8:
        label += " FP8"
    if batch_invariant:
        label += " invariant"
    per_query = 2 * _LATENT + _ROPE
    tokens = sum(lengths)
    token_bytes = 656 if fp8 else (_LATENT + _ROPE) * dtype.itemsize
    return Case(
        op="mla_decode",
        shape=label,
        dtype=dtype,
        bytes=tokens * token_bytes + batch * heads * per_query * dtype.itemsize,
        flops=2 * tokens * heads * per_query,
        make_inputs=make,
        contenders=contenders,
        limit="read",
        rotated=DECODE_BYTES if device.type == "cpu" else ROTATED_BYTES,
    )


def _radix(rows: PagedRows, batch_invariant: bool) -> Contender:
    return lambda _, q, r, kv: rk.mla_decode(
        q,
        r,
        kv,
        rows.page_table,
        rows.kv_lens,
        rows.cu_seqlens_q,
        softmax_scale=_SCALE,
        max_seqlen_q=1,
        batch_invariant=batch_invariant,
    )


def _flash_mla(flash: Any, rows: PagedRows, heads: int) -> Contender:
    def plan() -> Contender:
        metadata, splits = flash.get_mla_metadata(rows.kv_lens, heads, 1)
        return lambda joined, q, r, kv: flash.flash_mla_with_kvcache(
            joined,
            kv[:, :, None],
            rows.page_table,
            rows.kv_lens,
            _LATENT,
            metadata,
            splits,
            softmax_scale=_SCALE,
        )

    return peers.planned(plan)


def _flashinfer(flashinfer: Any, rows: PagedRows, heads: int, dtype: torch.dtype) -> Contender:
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=rows.page_table.device)

    def plan() -> Contender:
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        wrapper.plan(
            rows.cu_seqlens_q,
            rows.page_starts(),
            rows.page_ids(),
            rows.kv_lens,
            heads,
            _LATENT,
            _ROPE,
            rows.page_size,
            False,
            _SCALE,
            dtype,
            dtype,
        )
        return lambda _, q, r, kv: wrapper.run(q, r, kv[..., :_LATENT], kv[..., _LATENT:])

    return peers.planned(plan)


def _store(device: torch.device, dtype: torch.dtype, tokens: int, fp8: bool) -> Case:
    pages = 2 * tokens // 64 + 1
    page = 64
    slots = torch.randperm(pages * page, device=device)[:tokens]
    width, kind = (656, torch.uint8) if fp8 else (_LATENT + _ROPE, dtype)

    def make() -> tuple[torch.Tensor, ...]:
        latent = randn(tokens, _LATENT, device=device, dtype=dtype)
        rope = randn(tokens, _ROPE, device=device, dtype=dtype)
        return latent, rope, torch.zeros(pages, page, width, device=device, dtype=kind)

    contenders: dict[str, Contender] = {
        "radix": lambda x, r, cache: rk.store_mla_kv(x, r, cache, slots)
    }
    if not fp8:

        def indexed(x: torch.Tensor, r: torch.Tensor, cache: torch.Tensor) -> None:
            cache.view(-1, width)[slots] = torch.cat((x, r), -1)

        contenders["torch"] = indexed
    moved = tokens * ((_LATENT + _ROPE) * dtype.itemsize + width * kind.itemsize)
    return Case(
        op="store_mla_kv",
        shape=f"{tokens} tokens{' FP8' if fp8 else ''}",
        dtype=dtype,
        bytes=moved,
        flops=0,
        make_inputs=make,
        contenders=contenders,
    )


def _gather(device: torch.device, dtype: torch.dtype, lengths: Sequence[int], fp8: bool) -> Case:
    rows = paged_rows(device, lengths, 64)
    tokens = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    def make() -> tuple[torch.Tensor, ...]:
        cache = randn(rows.num_pages, 64, _LATENT + _ROPE, device=device, dtype=dtype)
        if fp8:
            cache = rk.reference.pack_mla_tokens(cache[..., :_LATENT], cache[..., _LATENT:])
        return cache, torch.empty(tokens, _LATENT + _ROPE, device=device, dtype=dtype)

    contenders: dict[str, Contender] = {
        "radix": lambda cache, out: rk.gather_mla_kv(cache, rows.page_table, ends, out)
    }
    if not fp8:

        def indexed(cache: torch.Tensor, out: torch.Tensor) -> None:
            torch.index_select(
                cache, 0, rows.page_table.flatten(), out=out.view(-1, *cache.shape[1:])
            )

        contenders["torch"] = indexed
    token_bytes = 656 if fp8 else (_LATENT + _ROPE) * dtype.itemsize
    return Case(
        op="gather_mla_kv",
        shape=f"{len(lengths)} x {lengths[0]} tokens{' FP8' if fp8 else ''}",
        dtype=dtype,
        bytes=tokens * (token_bytes + (_LATENT + _ROPE) * dtype.itemsize),
        flops=0,
        make_inputs=make,
        contenders=contenders,
    )


def _concat(device: torch.device, dtype: torch.dtype, tokens: int, heads: int) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        nope = randn(tokens, heads, _NOPE, device=device, dtype=dtype)
        rope = randn(tokens, 1, _ROPE, device=device, dtype=dtype)
        return torch.zeros(tokens, heads, _NOPE + _ROPE, device=device, dtype=dtype), nope, rope

    def joined(k: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
        torch.cat((nope, rope.expand(-1, heads, -1)), -1, out=k)

    contenders: dict[str, Contender] = {"radix": rk.concat_mla_k, "torch": joined}
    moved = tokens * (heads * (2 * _NOPE + _ROPE) + _ROPE) * dtype.itemsize
    return Case(
        op="concat_mla_k",
        shape=f"{tokens} tokens {heads} heads",
        dtype=dtype,
        bytes=moved,
        flops=0,
        make_inputs=make,
        contenders=contenders,
    )
