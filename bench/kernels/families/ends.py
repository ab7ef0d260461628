"""16-bit products with an end fused, on Hopper, by the rows of x: what the last tile's filling
costs, and where cuBLAS with the end apart is ahead (docs/kernels/notes/gemm.md has the table)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import radix_kernels as rk
from radix_kernels import _dispatch
from radix_kernels._products import GATE_HALVES, NO_GATE

from ..harness import Case, Contender
from .gemm import raw

ROWS = (72, 96, 128, 136, 160, 192, 224, 256, 320, 384, 512)
# O and down, which add a residual, of llama3-8b, qwen3-0.6b and qwen3-14b (down); gate and up.
RESIDUAL = ((4096, 4096), (4096, 14336), (1024, 2048), (1024, 3072), (5120, 17408))
GATED = ((28672, 4096),)


def ends(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """GPU only, sm_90. "radix" is the op, "kernel" the library's kernel wherever the op goes."""
    if device.type == "cpu":
        return
    for n, k in RESIDUAL:
        for rows in ROWS:
            yield _case(device, dtype, (rows, n, k), gated=False)
    for n, k in GATED:
        for rows in ROWS:
            yield _case(device, dtype, (rows, n, k), gated=True)


def _case(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], *, gated: bool
) -> Case:
    rows, n, k = shape
    results = n // 2 if gated else n
    moved = n * k + rows * (k + results) + (0 if gated else rows * n)
    return Case(
        op="linear_silu_and_mul" if gated else "linear, residual",
        shape=f"{rows}x{n}x{k}",
        dtype=dtype,
        bytes=moved * dtype.itemsize,
        flops=2 * rows * n * k,
        make_inputs=_inputs(device, dtype, shape, gated=gated),
        contenders=_gated(dtype) if gated else _residual(dtype),
        limit="read",
    )


def _inputs(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], *, gated: bool
) -> Callable[[], tuple[Any, ...]]:
    rows, n, k = shape

    def make() -> tuple[Any, ...]:
        x = torch.randn(rows, k, device=device, dtype=dtype)
        w = torch.randn(n, k, device=device, dtype=dtype) / k**0.5
        packed = rk.pack_weight(w)
        if gated:
            return x, packed
        return x, packed, torch.randn(rows, n, device=device, dtype=dtype)

    return make


def _residual(dtype: torch.dtype) -> dict[str, Contender]:
    return {
        "radix": lambda x, w, r: rk.linear(x, w, residual=r),
        "kernel": lambda x, w, r: _kernel(x, raw(w, dtype), r, NO_GATE),
        "cuBLAS mm, add": lambda x, w, r: F.linear(x, raw(w, dtype)).add_(r),
        "cuBLAS addmm": lambda x, w, r: torch.addmm(r, x, raw(w, dtype).t()),
    }


def _gated(dtype: torch.dtype) -> dict[str, Contender]:
    return {
        "radix": lambda x, w: rk.linear_silu_and_mul(x, w),
        "kernel": lambda x, w: _kernel(x, raw(w, dtype), None, GATE_HALVES),
        "cuBLAS mm, silu_and_mul": lambda x, w: rk.silu_and_mul(F.linear(x, raw(w, dtype))),
    }


def _kernel(
    x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None, gate: int
) -> torch.Tensor:
    """The library's kernel, of a weight that does not change."""
    run = _dispatch.native("linear_dense", x)
    if run is None:
        raise ValueError("ends: no library here has linear_dense")
    out = x.new_empty((x.shape[0], w.shape[0] if gate == NO_GATE else w.shape[0] // 2))
    run(x, w, None, residual, gate, True, out)
    return out
