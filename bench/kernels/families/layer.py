"""The products of a transformer layer with what stands before and behind them, in bf16 and in FP8
with row scales.

Each row is one step as the layer runs it: norm and QKV; O and the residual; norm, gate and up,
SiLU; down and the residual. Beside ours stands cuBLAS with a kernel for each of the rest: torch's
own in bf16, in FP8 our single ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import radix_kernels as rk

from ..harness import Case
from .gemm import FP8, raw

TOKENS = (1, 8, 32, 128, 256)
EPS = 1e-6


@dataclass
class Model:
    """The widths of a transformer layer."""

    name: str
    hidden: int
    attention: int  # query heads x head size
    qkv: int
    intermediate: int


MODELS = (
    Model(name="qwen3-0.6b", hidden=1024, attention=2048, qkv=4096, intermediate=3072),
    Model(name="llama3-8b", hidden=4096, attention=4096, qkv=6144, intermediate=14336),
)


def layer(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """GPU only: the four products of a layer with what surrounds them, for each model."""
    if device.type == "cpu":
        return
    for model in MODELS:
        for m in TOKENS:
            for kind in ("dense", "fp8"):
                yield from _steps(device, dtype, model, m, kind)


def _steps(
    device: torch.device, dtype: torch.dtype, model: Model, m: int, kind: str
) -> Iterator[Case]:
    h = model.hidden
    steps = _Dense(device, dtype) if kind == "dense" else _Fp8(device, dtype)
    for name, n, k in (
        ("qkv", model.qkv, h),
        ("o", h, model.attention),
        ("gate_up", 2 * model.intermediate, h),
        ("down", h, model.intermediate),
    ):
        ours, separate = getattr(steps, name)
        size = n * k * steps.weight_type.itemsize + m * (n + k) * dtype.itemsize
        yield Case(
            op=f"layer {name}",
            shape=f"{m} tokens of {model.name}",
            dtype=steps.weight_type,
            bytes=size,
            flops=2 * m * n * k,
            make_inputs=_inputs(steps, name, m, n, k),
            contenders={"radix": ours, "cuBLAS + separate": separate},
            limit="read",
        )


def _inputs(
    steps: _Dense | _Fp8, name: str, m: int, n: int, k: int
) -> Callable[[], tuple[Any, ...]]:
    """x, the residual in front (as x) and behind (as the result), the norm's weight, the
    product's."""

    def make() -> tuple[Any, ...]:
        before, after = (
            torch.randn(m, size, device=steps.device, dtype=steps.dtype) for size in (k, n)
        )
        norm = torch.rand(k, device=steps.device, dtype=steps.dtype) + 0.5
        return steps.x(name, m, k), before, after, norm, steps.weight(n, k)

    return make


Pair = tuple[Callable[..., Any], Callable[..., Any]]


class _Dense:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.weight_type = dtype

    def x(self, step: str, m: int, k: int) -> torch.Tensor:
        return torch.randn(m, k, device=self.device, dtype=self.dtype)

    def weight(self, n: int, k: int) -> rk.PackedWeight:
        return rk.pack_weight(
            torch.randn(n, k, device=self.device, dtype=self.weight_type) / k**0.5
        )

    def _normed(self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        residual.add_(x)
        return F.rms_norm(residual, norm.shape, norm, EPS)

    @property
    def qkv(self) -> Pair:
        def ours(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            rk.fused_add_rmsnorm(x, before, norm, EPS)
            return rk.linear(x, w)

        def separate(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            return F.linear(self._normed(x, before, norm), raw(w, self.weight_type))

        return ours, separate

    @property
    def gate_up(self) -> Pair:
        def ours(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            rk.fused_add_rmsnorm(x, before, norm, EPS)
            return rk.linear_silu_and_mul(x, w)

        def separate(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            gate, up = F.linear(self._normed(x, before, norm), raw(w, self.weight_type)).chunk(
                2, dim=-1
            )
            return F.silu(gate) * up

        return ours, separate

    @property
    def o(self) -> Pair:
        def ours(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            return rk.linear(x, w, residual=after)

        def separate(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            return F.linear(x, raw(w, self.weight_type)).add_(after)

        return ours, separate

    down = o


class _Fp8:
    """Row scales throughout: x is quantized in front of each product, a row at a time."""

    weight_type = FP8

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def x(self, step: str, m: int, k: int) -> Any:
        x = torch.randn(m, k, device=self.device, dtype=self.dtype)
        return rk.per_token_quant_fp8(x) if step == "down" else x

    def weight(self, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight as [k, n], and the scales of its columns."""
        weight = torch.randn(n, k, device=self.device).mul_(4).to(FP8)
        scales = torch.rand(1, n, device=self.device) + 0.5
        return weight.t(), scales

    def _ours(
        self, x: torch.Tensor, scales: torch.Tensor, w: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        return rk.fp8_scaled_mm(x, w[0], scales, w[1], self.dtype, static_weight=True)

    def _cublas(
        self, x: torch.Tensor, scales: torch.Tensor, w: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        return torch._scaled_mm(x, w[0], scales, w[1], out_dtype=self.dtype)

    @property
    def qkv(self) -> Pair:
        def ours(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            return self._ours(*rk.rmsnorm_quant_fp8(x, norm, EPS, None, residual=before), w)

        def separate(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            rk.fused_add_rmsnorm(x, before, norm, EPS)
            return self._cublas(*rk.per_token_quant_fp8(x), w)

        return ours, separate

    @property
    def gate_up(self) -> Pair:
        """With the quantization that `down` needs behind it."""

        def ours(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            both = self._ours(*rk.rmsnorm_quant_fp8(x, norm, EPS, None, residual=before), w)
            return rk.silu_and_mul_quant_fp8(both, None)

        def separate(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            rk.fused_add_rmsnorm(x, before, norm, EPS)
            return rk.per_token_quant_fp8(
                rk.silu_and_mul(self._cublas(*rk.per_token_quant_fp8(x), w))
            )

        return ours, separate

    @property
    def o(self) -> Pair:
        """With the quantization of what attention gives."""

        def ours(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            return self._ours(*rk.per_token_quant_fp8(x), w)

        def separate(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            return self._cublas(*rk.per_token_quant_fp8(x), w)

        return ours, separate

    @property
    def down(self) -> Pair:
        """What comes in is quantized: behind gate_up."""

        def ours(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            return self._ours(x[0], x[1], w)

        def separate(x: Any, before: Any, after: Any, norm: Any, w: Any) -> Any:
            return self._cublas(x[0], x[1], w)

        return ours, separate
