"""Prefill: whole prompts over contiguous keys and values (16 bits, FP8, the 192/128 heads of MLA),
and chunks behind a cached prefix in pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import radix_kernels as rk

from .. import peers
from ..harness import Case, Contender

_HQ = 32
_HKV = 8
_D = 128
_FP8 = torch.float8_e4m3fn
_WORKSPACE = 256 << 20  # bytes, of FlashInfer


def prefill(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """GPU only: causal, 32 query heads on 8 KV heads of 128; MLA's heads of 192 for keys and 128
    for values."""
    for kv_dtype in (dtype, _FP8):
        for batch, length in ((4, 2048), (1, 8192), (1, 32768)):
            yield _prompts(device, dtype, batch, length, kv_dtype)
    for batch, length, heads in ((1, 4096, 128), (1, 8192, 16)):
        yield _prompts(device, dtype, batch, length, dtype, heads, heads, 192)
    for batch in (1, 8):
        for page in (16, 1):
            yield _extend(device, dtype, batch, 512, 8192, page)


def _pairs(batch: int, new: int, cached: int) -> float:
    return batch * (new * cached + new * (new + 1) / 2)


def _offsets(device: torch.device, batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def _prompts(
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    length: int,
    kv_dtype: torch.dtype,
    hq: int = _HQ,
    hkv: int = _HKV,
    d: int = _D,
) -> Case:
    """kv_dtype: of q, k and v; dtype: of the result. d: of q and k; values have 128."""
    tokens = batch * length
    cu = _offsets(device, batch, length)
    fp8 = kv_dtype == _FP8
    scale = torch.ones(1, device=device) if fp8 else None

    def make() -> tuple[torch.Tensor, ...]:
        shapes = ((hq, d), (hkv, d), (hkv, _D))
        return tuple(
            torch.randn(tokens, *shape, device=device, dtype=dtype).to(kv_dtype) for shape in shapes
        )

    contenders: dict[str, Contender] = {"radix": _radix_ragged(cu, length, scale)}
    if not fp8:
        contenders["torch cuDNN"] = _cudnn(batch, length)
    flash = peers.load("vllm.vllm_flash_attn")
    if flash:
        descale = torch.ones(batch, hkv, device=device) if fp8 else None
        contenders["FA3 (vllm)"] = _fa3_ragged(flash, cu, length, descale)
    flashinfer = peers.load("flashinfer")
    if flashinfer:
        contenders["flashinfer fa3"] = _flashinfer_ragged(
            flashinfer, cu, (hq, hkv, d), kv_dtype, dtype
        )
    label = f"B{batch} S{length} {hq}/{hkv}x{d}"
    if d != _D:
        label += f"/{_D}"
    if fp8:
        label += " FP8"
    read = tokens * ((hq + hkv) * d + hkv * _D) * kv_dtype.itemsize
    written = tokens * hq * _D * dtype.itemsize
    return Case(
        op="flash_attn_varlen",
        shape=label,
        dtype=dtype,
        bytes=read + written,
        flops=2 * hq * (d + _D) * _pairs(batch, length, 0),
        make_inputs=make,
        contenders=contenders,
    )


def _radix_ragged(cu: torch.Tensor, length: int, scale: torch.Tensor | None) -> Contender:
    return lambda q, k, v: rk.flash_attn_varlen(
        q, k, v, cu, cu, q_scale=scale, k_scale=scale, v_scale=scale, max_seqlen_q=length
    )


def _cudnn(batch: int, length: int) -> Contender:
    def run(*tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in tokens)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return run


def _fa3_ragged(
    flash: Any, cu: torch.Tensor, length: int, descale: torch.Tensor | None
) -> Contender:
    return lambda q, k, v: flash.flash_attn_varlen_func(
        q,
        k,
        v,
        length,
        cu,
        length,
        cu_seqlens_k=cu,
        causal=True,
        fa_version=3,
        q_descale=descale,
        k_descale=descale,
        v_descale=descale,
    )


def _flashinfer_ragged(
    flashinfer: Any,
    cu: torch.Tensor,
    heads: tuple[int, int, int],
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
) -> Contender:
    """heads: of queries, of keys, and the size of one in q and k."""
    hq, hkv, d = heads
    device = cu.device
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
    scales: list[torch.Tensor] = []
    if kv_dtype == _FP8:
        scales = [torch.ones(count, device=device) for count in (hq, hkv, hkv)]

    def plan() -> Contender:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        wrapper.plan(
            cu,
            cu,
            hq,
            hkv,
            d,
            head_dim_vo=_D,
            causal=True,
            q_data_type=kv_dtype,
            kv_data_type=kv_dtype,
            o_data_type=dtype,
        )
        return lambda q, k, v: wrapper.run(q, k, v, *scales)

    return peers.planned(plan)


def _extend(
    device: torch.device, dtype: torch.dtype, batch: int, new: int, cached: int, page: int
) -> Case:
    length = new + cached
    width = -(-length // page)
    cu = _offsets(device, batch, new)
    table = torch.randperm(batch * width, device=device).to(torch.int32).view(batch, width)
    lens = torch.full((batch,), length, dtype=torch.int32, device=device)

    def make() -> tuple[torch.Tensor, ...]:
        q = torch.randn(batch * new, _HQ, _D, device=device, dtype=dtype)
        pages = (batch * width, page, _HKV, _D)
        k = torch.randn(pages, device=device, dtype=dtype)
        v = torch.randn(pages, device=device, dtype=dtype)
        return q, k, v

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rk.flash_attn_with_kvcache(q, k, v, table, lens, cu, max_seqlen_q=new)

    contenders: dict[str, Contender] = {"radix": ours}
    flash = peers.load("vllm.vllm_flash_attn")
    if flash:
        contenders["FA3 (vllm)"] = lambda q, k, v: flash.flash_attn_varlen_func(
            q, k, v, new, cu, length, seqused_k=lens, block_table=table, causal=True, fa_version=3
        )
    flashinfer = peers.load("flashinfer")
    if flashinfer:
        last = torch.full((batch,), (length - 1) % page + 1, dtype=torch.int32, device=device)
        contenders["flashinfer fa3"] = _flashinfer_paged(flashinfer, cu, table, last, page, dtype)
    size = (2 * batch * length * _HKV + 2 * batch * new * _HQ) * _D * dtype.itemsize
    return Case(
        op="flash_attn_with_kvcache",
        shape=f"B{batch} {new} on {cached} page {page} {_HQ}/{_HKV}x{_D}",
        dtype=dtype,
        bytes=size,
        flops=4 * _HQ * _D * _pairs(batch, new, cached),
        make_inputs=make,
        contenders=contenders,
    )


def _flashinfer_paged(
    flashinfer: Any,
    cu: torch.Tensor,
    table: torch.Tensor,
    last: torch.Tensor,
    page: int,
    dtype: torch.dtype,
) -> Contender:
    """table: [rows, pages of each]; last: tokens in each row's last page."""
    batch, width = table.shape
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=table.device)

    def plan() -> Contender:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        wrapper.plan(
            cu,
            _offsets(table.device, batch, width),
            table.flatten(),
            last,
            _HQ,
            _HKV,
            _D,
            page,
            causal=True,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return lambda q, k, v: wrapper.run(q, (k, v))

    return peers.planned(plan)
