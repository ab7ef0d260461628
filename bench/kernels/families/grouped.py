"""Grouped products: the two forms of DeepGEMM, at the sizes of expert-parallel models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import radix_kernels as rk

from ..harness import Case, Contender
from .moe_peers import deep_gemm

# (groups, rows of each, N, K): an up product of Qwen3-30B-A3B; a down and an up product of
# DeepSeek-V3.
CONTIGUOUS = ((128, 256, 1536, 2048), (8, 4096, 7168, 2048), (32, 256, 4096, 7168))
# (groups, room for rows, rows of each in the mean, N, K)
MASKED = ((32, 1024, 64, 4096, 7168), (6, 1024, 1024, 4096, 7168))
FP8 = torch.float8_e4m3fn


def grouped(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """GPU only: products of groups of rows, contiguous and masked, in 16 bits and FP8."""
    if device.type != "cuda":
        return
    for which in (dtype, FP8):
        for shape in CONTIGUOUS:
            yield _contiguous(device, which, *shape)
        for masked in MASKED:
            yield _masked(device, which, *masked)


def _weight(
    device: torch.device, dtype: torch.dtype, groups: int, n: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    w = torch.randn(groups, n, k, device=device, dtype=torch.bfloat16) * k**-0.5
    return w.to(dtype), torch.rand(groups, -(-n // 128), k // 128, device=device) + 0.5


def _rows(
    device: torch.device, dtype: torch.dtype, *shape: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(shape, device=device, dtype=torch.bfloat16).to(dtype)
    return x, torch.rand(*shape[:-1], shape[-1] // 128, device=device) + 0.5


def _size(dtype: torch.dtype, groups: int, rows: int, n: int, k: int) -> float:
    return (groups * n * k + groups * rows * k) * dtype.itemsize + groups * rows * n * 2


def _contiguous(
    device: torch.device, dtype: torch.dtype, groups: int, rows: int, n: int, k: int
) -> Case:
    w, w_scale = _weight(device, dtype, groups, n, k)
    owner = torch.arange(groups, dtype=torch.int32, device=device).repeat_interleave(rows)
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=device) * rows
    fp8 = dtype == FP8

    def make() -> tuple[torch.Tensor, ...]:
        out = torch.empty(groups * rows, n, device=device, dtype=torch.bfloat16)
        return *_rows(device, dtype, groups * rows, k), out

    def radix(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        scales = {"x_scale": scale, "weight_scale": w_scale} if fp8 else {}
        rk.m_grouped_gemm_contiguous(x, w, owner, **scales, out=out)

    contenders: dict[str, Contender] = {"radix": radix}
    if not fp8 and hasattr(F, "grouped_mm"):
        contenders["torch grouped_mm"] = lambda x, scale, out: F.grouped_mm(x, w.mT, offs=ends)
    if fp8 and (deep := deep_gemm("m_grouped_fp8_gemm_nt_contiguous")):
        contenders["DeepGEMM"] = lambda x, scale, out: deep((x, scale), (w, w_scale), out, owner)
    shape = f"{groups}x{rows}x{n}x{k}{' fp8' if fp8 else ''}"
    size = _size(dtype, groups, rows, n, k)
    flops = 2 * groups * rows * n * k
    return Case(
        op="m_grouped_gemm_contiguous",
        shape=shape,
        dtype=dtype,
        bytes=size,
        flops=flops,
        make_inputs=make,
        contenders=contenders,
        limit="read",
    )


def _masked(
    device: torch.device, dtype: torch.dtype, groups: int, room: int, rows: int, n: int, k: int
) -> Case:
    w, w_scale = _weight(device, dtype, groups, n, k)
    counts = torch.full((groups,), rows, dtype=torch.int32, device=device)
    fp8 = dtype == FP8

    def make() -> tuple[torch.Tensor, ...]:
        x, scale = _rows(device, dtype, groups, room, k)
        return x, scale, torch.empty(groups, room, n, device=device, dtype=torch.bfloat16)

    def radix(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        scales = {"x_scale": scale, "weight_scale": w_scale} if fp8 else {}
        rk.m_grouped_gemm_masked(x, w, counts, expected_m=rows, **scales, out=out)

    contenders: dict[str, Contender] = {"radix": radix}
    if fp8 and (deep := deep_gemm("fp8_m_grouped_gemm_nt_masked")):
        contenders["DeepGEMM"] = lambda x, scale, out: deep(
            (x, scale), (w, w_scale), out, counts, rows
        )
    shape = f"{groups}x{rows} of {room}x{n}x{k}{' fp8' if fp8 else ''}"
    size = _size(dtype, groups, rows, n, k)
    flops = 2 * groups * rows * n * k
    return Case(
        op="m_grouped_gemm_masked",
        shape=shape,
        dtype=dtype,
        bytes=size,
        flops=flops,
        make_inputs=make,
        contenders=contenders,
        limit="read",
    )
