"""Activations to INT8 and FP8 with a scale a token, alone and behind a norm or SiLU-and-mul: the
widths of llama3-8b."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import radix_kernels as rk

from .. import peers
from ..harness import Case, Contender

EPS = 1e-6
TOKENS = (1, 64, 4096)
HIDDEN = 4096
INTER = 14336
Quantized = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Format:
    """Our ops for one element: alone, behind SiLU-and-mul, behind a norm. vllm: what of its ops
    takes the place of the first."""

    dtype: torch.dtype
    alone: Callable[[torch.Tensor], Quantized]
    gated: Callable[[torch.Tensor], Quantized]
    normed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Quantized]
    vllm: Callable[[Any, torch.Tensor], Any]


INT8 = _Format(
    dtype=torch.int8,
    alone=lambda x: rk.per_token_quant_int8(x),
    gated=lambda x: rk.silu_and_mul_quant_int8(x),
    normed=lambda x, w, residual: rk.rmsnorm_quant_int8(x, w, EPS, residual=residual),
    vllm=lambda ops, x: ops.scaled_int8_quant(x),
)
FP8 = _Format(
    dtype=torch.float8_e4m3fn,
    alone=lambda x: rk.per_token_quant_fp8(x),
    gated=lambda x: rk.silu_and_mul_quant_fp8(x, None),
    normed=lambda x, w, residual: rk.rmsnorm_quant_fp8(x, w, EPS, None, residual=residual),
    vllm=lambda ops, x: ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True),
)
NAMES = {"int8": INT8, "fp8": FP8}


def quantize(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """GPU only: on the CPU products quantize x themselves."""
    if device.type == "cuda":
        yield from rows(device, dtype)


def rows(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Both formats, on any device."""
    for name in NAMES:
        for tokens in TOKENS:
            for width in (HIDDEN, INTER):
                yield alone(device, dtype, name, tokens, width)
            yield gated(device, dtype, name, tokens, INTER)
            yield normed(device, dtype, name, tokens, HIDDEN, add=False)
            yield normed(device, dtype, name, tokens, HIDDEN, add=True)


def alone(device: torch.device, dtype: torch.dtype, name: str, tokens: int, width: int) -> Case:
    """A scale a token, of what is in memory."""
    form = NAMES[name]
    contenders: dict[str, Contender] = {"radix": form.alone}
    if vllm := peers.load("vllm._custom_ops"):
        contenders["vllm"] = lambda x: form.vllm(vllm, x)
    return Case(
        op=f"per_token_quant_{name}",
        shape=f"{tokens}x{width}",
        dtype=dtype,
        bytes=tokens * width * (dtype.itemsize + 1),
        flops=3 * tokens * width,
        make_inputs=lambda: (torch.randn(tokens, width, device=device, dtype=dtype),),
        contenders=contenders,
    )


def gated(device: torch.device, dtype: torch.dtype, name: str, tokens: int, inter: int) -> Case:
    """Behind SiLU-and-mul. vLLM has no such op with a scale a token: two of its kernels."""
    form = NAMES[name]

    def two_of_vllm(x: torch.Tensor) -> Any:
        out = torch.empty(tokens, inter, device=device, dtype=dtype)
        torch.ops._C.silu_and_mul(out, x)
        return form.vllm(vllm, out)

    contenders: dict[str, Contender] = {
        "radix": form.gated,
        "separate": lambda x: form.alone(rk.silu_and_mul(x)),
    }
    if vllm := peers.load("vllm._custom_ops"):
        contenders["vllm, two kernels"] = two_of_vllm
    return Case(
        op=f"silu_and_mul_quant_{name}",
        shape=f"{tokens}x{inter}",
        dtype=dtype,
        bytes=tokens * inter * (2 * dtype.itemsize + 1),
        flops=8 * tokens * inter,
        make_inputs=lambda: (torch.randn(tokens, 2 * inter, device=device, dtype=dtype),),
        contenders=contenders,
    )


def normed(
    device: torch.device, dtype: torch.dtype, name: str, tokens: int, hidden: int, *, add: bool
) -> Case:
    """Behind RMSNorm; add: of the sum with a residual, which is kept."""
    form = NAMES[name]
    weight = torch.randn(hidden, device=device, dtype=dtype)

    def make() -> tuple[torch.Tensor | None, ...]:
        x, residual = (torch.randn(tokens, hidden, device=device, dtype=dtype) for _ in range(2))
        return x, weight, residual if add else None

    def separate(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None) -> Quantized:
        if residual is None:
            return form.alone(rk.rmsnorm(x, w, EPS))
        rk.fused_add_rmsnorm(x, residual, w, EPS)
        return form.alone(x)

    contenders: dict[str, Contender] = {
        "radix": form.normed,
        "separate": separate,
    }
    if vllm := peers.load("vllm._custom_ops"):
        contenders["vllm"] = lambda x, w, residual: vllm.rms_norm_dynamic_per_token_quant(
            x, w, EPS, form.dtype, residual=residual
        )
    moved = dtype.itemsize * (3 if add else 1) + 1
    return Case(
        op=f"rmsnorm_quant_{name}" + (" residual" if add else ""),
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        bytes=tokens * hidden * moved,
        flops=7 * tokens * hidden,
        make_inputs=make,
        contenders=contenders,
    )
