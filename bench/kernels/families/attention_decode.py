"""Decode: one query token a row over a paged cache, bf16 and FP8, equal and ragged rows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

import radix_kernels as rk

from .. import peers
from ..harness import Case, Contender

_D = 128
WORKSPACE = 512 << 20  # bytes, of FlashInfer


def decode(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """GPU only."""
    for batch, length, page, hq in (
        (1, 8192, 16, 32),
        (64, 4096, 16, 32),
        (64, 4096, 1, 32),
        (256, 1024, 16, 32),
        (16, 32768, 16, 32),
        (64, 4096, 16, 64),
    ):
        yield _rows(device, dtype, [length] * batch, f"B{batch} kv{length}", page, hq)
    lengths = random.Random(0)
    for batch in (130, 256):
        yield _rows(
            device,
            dtype,
            [lengths.randint(100, 2048) for _ in range(batch)],
            f"B{batch} kv100..2048",
            16,
            16,
        )
    yield _rows(device, dtype, [4096] * 64, "B64 kv4096", 16, 32, fp8=True)


def page_table(
    device: torch.device, lengths: Sequence[int], page: int
) -> tuple[int, list[int], torch.Tensor]:
    """(pages, pages of each row, page table): the pages of all rows in random order."""
    needed = [-(-n // page) for n in lengths]
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    order = torch.randperm(sum(needed)).to(torch.int32).split(needed)
    for row, pages in zip(table, order, strict=True):
        row[: len(pages)] = pages
    return sum(needed), needed, table.to(device)


def _rows(
    device: torch.device,
    dtype: torch.dtype,
    lengths: Sequence[int],
    name: str,
    page: int,
    hq: int,
    hkv: int = 8,
    fp8: bool = False,
) -> Case:
    batch = len(lengths)
    pages, needed, table = page_table(device, lengths, page)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    cu = torch.arange(batch + 1, dtype=torch.int32, device=device)
    kv_dtype = torch.float8_e4m3fn if fp8 else dtype
    scale = torch.ones(1, device=device) if fp8 else None

    def make() -> tuple[torch.Tensor, ...]:
        q = torch.randn(batch, hq, _D, device=device, dtype=dtype)
        k, v = (
            torch.randn(pages, page, hkv, _D, device=device, dtype=dtype).to(kv_dtype)
            for _ in range(2)
        )
        return q, k, v

    contenders: dict[str, Contender] = {
        "radix": lambda q, k, v: rk.flash_attn_with_kvcache(
            q, k, v, table, lens, cu, k_scale=scale, v_scale=scale, max_seqlen_q=1
        )
    }
    if (flash := peers.load("vllm.vllm_flash_attn")) and not fp8:
        contenders["FA3 (vllm)"] = lambda q, k, v: flash.flash_attn_varlen_func(
            q,
            k,
            v,
            1,
            cu,
            max(lengths),
            seqused_k=lens,
            block_table=table,
            causal=True,
            fa_version=3,
        )
    if flashinfer := peers.load("flashinfer"):
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        last = torch.tensor([(n - 1) % page + 1 for n in lengths], dtype=torch.int32, device=device)
        starts = torch.tensor([0, *needed], device=device).cumsum(0).to(torch.int32)
        used = torch.cat([row[:n] for row, n in zip(table, needed, strict=True)])

        def plan() -> Contender:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True
            )
            wrapper.plan(
                starts, used, last, hq, hkv, _D, page, q_data_type=dtype, kv_data_type=kv_dtype
            )
            return lambda q, k, v: wrapper.run(q, (k, v))

        contenders["flashinfer"] = peers.planned(plan)
    tokens = sum(lengths)
    size = 2 * tokens * hkv * _D * kv_dtype.itemsize + 2 * batch * hq * _D * dtype.itemsize
    return Case(
        op="flash_attn_with_kvcache",
        shape=f"{name} page {page} {hq}/{hkv}x{_D}{' FP8' if fp8 else ''}",
        dtype=dtype,
        bytes=size,
        flops=4 * tokens * hq * _D,
        make_inputs=make,
        contenders=contenders,
        limit="read",
    )
