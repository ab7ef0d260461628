"""Paged attention: decode in batches and over one long row, prefill of one prompt."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import radix_kernels as rk

from ..harness import DECODE_BYTES, ROTATED_BYTES, Case, randn
from .attention_decode import decode
from .attention_prefill import prefill


def attention(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """On a GPU the families of decode and prefill; on the CPU both beside torch's attention."""
    if device.type == "cuda":
        yield from decode(device, dtype)
        yield from prefill(device, dtype)
        return
    hq = 16
    hkv = 8
    d = 128
    for batch, length in ((1, 1024), (1, 16384), (32, 1024)):
        yield _attention_case(device, dtype, hq, hkv, d, batch, 1, length)
    for length in (128, 1024, 4096):
        yield _attention_case(device, dtype, hq, hkv, d, 1, length, length)


def _attention_case(
    device: torch.device,
    dtype: torch.dtype,
    hq: int,
    hkv: int,
    d: int,
    batch: int,
    new: int,
    length: int,
    page: int = 16,
) -> Case:
    pages = batch * -(-length // page)
    table = torch.arange(pages, dtype=torch.int32, device=device).view(batch, -1)
    kv_lens = torch.full((batch,), length, dtype=torch.int32, device=device)
    cu = torch.arange(0, (batch + 1) * new, new, dtype=torch.int32, device=device)

    def make() -> tuple[torch.Tensor, ...]:
        q = randn(batch * new, hq, d, device=device, dtype=dtype)
        k, v = (randn(pages, page, hkv, d, device=device, dtype=dtype) for _ in range(2))
        return q, k, v

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rk.flash_attn_with_kvcache(q, k, v, table, kv_lens, cu)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # The contiguous layout that torch needs: a view here, since pages lie in order.
        k, v = (x.view(batch, length, hkv, d).transpose(1, 2) for x in (k, v))
        q = q.view(batch, new, hq, d).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=new > 1, enable_gqa=True)

    pairs = new * (length - new) + new * (new + 1) / 2
    kv_bytes = 2 * batch * length * hkv * d
    return Case(
        op="flash_attn_with_kvcache",
        shape=f"B{batch} q{new} kv{length} {hq}/{hkv}x{d}",
        dtype=dtype,
        bytes=(kv_bytes + 2 * batch * new * hq * d) * dtype.itemsize,
        flops=4 * batch * hq * d * pairs,
        make_inputs=make,
        contenders={"radix": ours, "torch sdpa": sdpa},
        limit="read" if new == 1 else "copy",
        rotated=DECODE_BYTES if new == 1 else ROTATED_BYTES,
    )
