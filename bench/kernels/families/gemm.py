"""Products of a layer on Hopper: few tokens in bf16, FP8 and INT8 with any number, SiLU-and-mul
fused; LM heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import radix_kernels as rk

from .. import peers
from ..harness import Case, Contender

FP8 = torch.float8_e4m3fn
Weights = tuple[tuple[int, int, tuple[int, ...]], ...]  # rows, columns, numbers of tokens
# Weight rows and columns: QKV, O, gate and up (fused), down of llama3-8b and qwen3-0.6b; the
# latter's LM head.
LAYERS = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (4096, 1024),
    (1024, 2048),
    (1024, 3072),
)
GATED = ((28672, 4096), (6144, 1024))
HEAD = (151936, 1024)
SCALED: Weights = ((6144, 4096, (16,)), (28672, 4096, (64, 256, 4096)))
BLOCKWISE: Weights = ((24576, 1536, (64,)), (28672, 4096, (256, 4096)), (7168, 16384, (4096,)))


def gemm(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """GPU only; packed weights on the CPU are the family `linear`."""
    if device.type == "cpu":
        return
    yield from _dense_cases(device, dtype)
    yield from _fp8_cases(device)
    for n, k, tokens in SCALED:
        for m in tokens:
            yield int8_case(device, m, n, k, shifted=False)
            yield int8_case(device, m, n, k, shifted=True)


def _dense_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for n, k in LAYERS:
        for m in (1, 16, 64):
            yield _linear(device, dtype, m, n, k)
    for m in (1, 64, 256):
        yield _linear(device, dtype, m, *HEAD)
    for n, k in GATED:
        for m in (1, 16, 64):
            yield _gated(device, dtype, m, n, k)


def _fp8_cases(device: torch.device) -> Iterator[Case]:
    for n, k, tokens in SCALED:
        for m in tokens:
            yield _scaled(device, m, n, k, False)
            yield _scaled(device, m, n, k, True)
    for n, k, tokens in BLOCKWISE:
        for m in tokens:
            yield _blockwise(device, m, n, k)


def _linear(device: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> Case:
    return Case(
        op="linear",
        shape=f"{m}x{n}x{k}",
        dtype=dtype,
        bytes=(n * k + m * (n + k)) * dtype.itemsize,
        flops=2 * m * n * k,
        make_inputs=_dense(device, dtype, m, n, k),
        contenders={
            "radix": lambda x, w: rk.linear(x, w),
            "torch": lambda x, w: F.linear(x, raw(w, dtype)),
        },
        limit="read",
    )


def _gated(device: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> Case:
    return Case(
        op="linear_silu_and_mul",
        shape=f"{m}x{n}x{k}",
        dtype=dtype,
        bytes=(n * k + m * (n // 2 + k)) * dtype.itemsize,
        flops=2 * m * n * k,
        make_inputs=_dense(device, dtype, m, n, k),
        contenders={
            "radix": lambda x, w: rk.linear_silu_and_mul(x, w),
            "torch + silu_and_mul": lambda x, w: rk.silu_and_mul(F.linear(x, raw(w, dtype))),
        },
        limit="read",
    )


def _dense(
    device: torch.device, dtype: torch.dtype, m: int, n: int, k: int
) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        x, w = (torch.randn(rows, k, device=device, dtype=dtype) for rows in (m, n))
        return x, rk.pack_weight(w / k**0.5)

    return make


def raw(w: rk.PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """On a GPU a packed weight is the row-major one: both read the same bytes."""
    view: torch.Tensor = w.data.view(dtype).view(w.shape)
    return view


def _fp8(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device).mul_(4).to(FP8)


def _scaled(device: torch.device, m: int, n: int, k: int, fast: bool) -> Case:
    """fast: sums in the tensor cores over all of K, by all; vLLM's are so in any case."""

    def make() -> tuple[torch.Tensor, ...]:
        scales = (torch.rand(m, 1, device=device) + 0.5, torch.rand(1, n, device=device) + 0.5)
        return _fp8(device, m, k), _fp8(device, n, k).t(), *scales

    def ours(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        return rk.fp8_scaled_mm(a, b, sa, sb, static_weight=True, fast_accum=fast)

    def rows(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def tensor(
        a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor
    ) -> torch.Tensor:
        return torch._scaled_mm(
            a, b, sa[0, 0], sb[0, 0], out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    contenders: dict[str, Contender] = {
        "radix": ours,
        "torch rowwise": rows,
        "cuBLASLt tensor": tensor,
    }
    if vllm := peers.load("vllm._custom_ops") if fast else None:
        contenders["vLLM CUTLASS"] = lambda a, b, sa, sb: vllm.cutlass_scaled_mm(
            a, b, sa, sb, torch.bfloat16
        )
    size = n * k + m * k + 2 * m * n
    op = "fp8_scaled_mm" + (" fast_accum" if fast else "")
    return Case(
        op=op,
        shape=f"{m}x{n}x{k}",
        dtype=FP8,
        bytes=size,
        flops=2 * m * n * k,
        make_inputs=make,
        contenders=contenders,
        limit="read",
    )


def int8_case(device: torch.device, m: int, n: int, k: int, *, shifted: bool) -> Case:
    """Scales of rows and columns. shifted: of tokens with zero points."""

    def make() -> tuple[torch.Tensor, ...]:
        a, b = (
            torch.randint(-127, 128, (rows, k), device=device, dtype=torch.int8) for rows in (m, n)
        )
        scales = (torch.rand(m, 1, device=device) + 0.5, torch.rand(1, n, device=device) + 0.5)
        if not shifted:
            return a, b.t(), *scales
        azp = torch.randint(-128, 128, (m, 1), device=device, dtype=torch.int32)
        return a, b.t(), *scales, azp, b.sum(1, dtype=torch.int32)

    return Case(
        op="int8_scaled_mm" + (" azp" if shifted else ""),
        shape=f"{m}x{n}x{k}",
        dtype=torch.int8,
        bytes=n * k + m * k + 2 * m * n,
        flops=2 * m * n * k,
        make_inputs=make,
        contenders=_shifted_int8() if shifted else _symmetric_int8(m),
        limit="read",
    )


def _symmetric_int8(m: int) -> dict[str, Contender]:
    def ours(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        return rk.int8_scaled_mm(a, b, sa, sb, static_weight=True)

    def sums(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(a, b)

    contenders: dict[str, Contender] = {"radix": ours}
    if m > 16:  # what torch takes; without scales, to int32
        contenders["cuBLASLt sums"] = sums
    if vllm := peers.load("vllm._custom_ops"):
        contenders["vLLM CUTLASS"] = lambda a, b, sa, sb: vllm.cutlass_scaled_mm(
            a, b, sa, sb, torch.bfloat16
        )
    return contenders


def _shifted_int8() -> dict[str, Contender]:
    contenders: dict[str, Contender] = {
        "radix": lambda a, b, sa, sb, azp, sums: rk.int8_scaled_mm(
            a, b, sa, sb, azp=azp, b_sums=sums, static_weight=True
        ),
    }
    if vllm := peers.load("vllm._custom_ops"):
        contenders["vLLM CUTLASS"] = lambda a, b, sa, sb, azp, sums: vllm.cutlass_scaled_mm_azp(
            a, b, sa, sb, torch.bfloat16, sums, azp
        )
    return contenders


def _blockwise(device: torch.device, m: int, n: int, k: int) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        # Scales of a group of k beside each other, as the peer's TMA wants
        # them.
        sa = torch.rand(k // 128, m, device=device) + 0.5
        sb = torch.rand(n // 128, k // 128, device=device) + 0.5
        return _fp8(device, m, k), _fp8(device, n, k).t(), sa.t(), sb.t()

    def ours(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        return rk.fp8_blockwise_scaled_mm(a, b, sa, sb, static_weight=True)

    def tensor(
        a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor
    ) -> torch.Tensor:
        return torch._scaled_mm(a, b, sa[0, 0], sb[0, 0], out_dtype=torch.bfloat16)

    contenders: dict[str, Contender] = {"radix": ours, "cuBLASLt tensor": tensor}
    if deep_gemm := peers.load("vllm.third_party.deep_gemm"):
        out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        contenders["DeepGEMM"] = lambda a, b, sa, sb: deep_gemm.fp8_gemm_nt(
            (a, sa), (b.t(), sb.t()), out
        )
    size = n * k + m * k + 2 * m * n
    return Case(
        op="fp8_blockwise_scaled_mm",
        shape=f"{m}x{n}x{k}",
        dtype=FP8,
        bytes=size,
        flops=2 * m * n * k,
        make_inputs=make,
        contenders=contenders,
        limit="read",
    )
