"""Decode: one query token a row over a paged cache, bf16 and FP8, equal and ragged rows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
        ragged = [lengths.randint(100, 2048) for _ in range(batch)]
        yield _rows(device, dtype, ragged, f"B{batch} kv100..2048", 16, 16)
    yield _rows(device, dtype, [4096] * 64, "B64 kv4096", 16, 32, fp8=True)


@dataclass(frozen=True)
class PagedRows:
    """Rows with one query each over a paged cache; the pages lie in random order."""

    lengths: Sequence[int]
    page_size: int
    pages_of_row: list[int]
    page_table: torch.Tensor  # [rows, most pages of a row] int32, 0 behind a row's pages
    kv_lens: torch.Tensor  # [rows] int32
    cu_seqlens_q: torch.Tensor  # [rows + 1] int32

    @property
    def num_pages(self) -> int:
        return sum(self.pages_of_row)

    def page_starts(self) -> torch.Tensor:
        """[rows + 1] int32: where each row's pages begin in `page_ids`."""
        counts = torch.tensor([0, *self.pages_of_row], device=self.page_table.device)
        return counts.cumsum(0).to(torch.int32)

    def page_ids(self) -> torch.Tensor:
        """[num_pages] int32: the pages of all rows, one row behind another."""
        rows = zip(self.page_table, self.pages_of_row, strict=True)
        return torch.cat([row[:count] for row, count in rows])

    def last_page_lens(self) -> torch.Tensor:
        """[rows] int32: tokens in the last page of each row."""
        return (self.kv_lens - 1) % self.page_size + 1


def paged_rows(device: torch.device, lengths: Sequence[int], page_size: int) -> PagedRows:
    """Rows of these lengths over pages of `page_size` tokens in random order."""
    pages_of_row = [-(-length // page_size) for length in lengths]
    page_table = torch.zeros(len(lengths), max(pages_of_row), dtype=torch.int32)
    order = torch.randperm(sum(pages_of_row)).to(torch.int32).split(pages_of_row)
    for row, pages in zip(page_table, order, strict=True):
        row[: len(pages)] = pages
    return PagedRows(
        lengths=lengths,
        page_size=page_size,
        pages_of_row=pages_of_row,
        page_table=page_table.to(device),
        kv_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
    )


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
    rows = paged_rows(device, lengths, page)
    batch = len(lengths)
    kv_dtype = torch.float8_e4m3fn if fp8 else dtype
    scale = torch.ones(1, device=device) if fp8 else None

    def make() -> tuple[torch.Tensor, ...]:
        q = torch.randn(batch, hq, _D, device=device, dtype=dtype)
        pages = (rows.num_pages, page, hkv, _D)
        k = torch.randn(pages, device=device, dtype=dtype).to(kv_dtype)
        v = torch.randn(pages, device=device, dtype=dtype).to(kv_dtype)
        return q, k, v

    contenders: dict[str, Contender] = {"radix": _radix(rows, scale)}
    flash = peers.load("vllm.vllm_flash_attn")
    if flash and not fp8:
        contenders["FA3 (vllm)"] = _fa3(flash, rows)
    flashinfer = peers.load("flashinfer")
    if flashinfer:
        contenders["flashinfer"] = _flashinfer(flashinfer, rows, hq, hkv, dtype, kv_dtype)
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


def _radix(rows: PagedRows, scale: torch.Tensor | None) -> Contender:
    return lambda q, k, v: rk.flash_attn_with_kvcache(
        q,
        k,
        v,
        rows.page_table,
        rows.kv_lens,
        rows.cu_seqlens_q,
        k_scale=scale,
        v_scale=scale,
        max_seqlen_q=1,
    )


def _fa3(flash: Any, rows: PagedRows) -> Contender:
    return lambda q, k, v: flash.flash_attn_varlen_func(
        q,
        k,
        v,
        1,
        rows.cu_seqlens_q,
        max(rows.lengths),
        seqused_k=rows.kv_lens,
        block_table=rows.page_table,
        causal=True,
        fa_version=3,
    )


def _flashinfer(
    flashinfer: Any,
    rows: PagedRows,
    hq: int,
    hkv: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> Contender:
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=rows.page_table.device)

    def plan() -> Contender:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(
            rows.page_starts(),
            rows.page_ids(),
            rows.last_page_lens(),
            hq,
            hkv,
            _D,
            rows.page_size,
            q_data_type=dtype,
            kv_data_type=kv_dtype,
        )
        return lambda q, k, v: wrapper.run(q, (k, v))

    return peers.planned(plan)
