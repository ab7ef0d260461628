"""Quantization to FP8 and INT8, alone and behind an activation or a norm.

An error is in halves of the distance between the two nearest codes: a rounded value is at most one
off, and a value in the middle may become either.
"""

from __future__ import annotations

import torch

from .bounds import EXACT, HALF_STEP, ROUNDED_ONCE, SCALE
from .trial import Trial, Wrong, case, reference, rk

_MANTISSA = 3
_INT8 = 127
_SHAPES = ((1, 128), (7, 512), (33, 1024))


@case
def per_tensor_quant_fp8(t: Trial) -> None:
    for rows, width in _SHAPES:
        x = t.randn(rows, width)
        codes, scale = rk.per_tensor_quant_fp8(t.there(x))
        _check(t, x, codes, scale.view(1, 1), x.double().abs().amax().view(1, 1))


@case
def per_token_quant_fp8(t: Trial) -> None:
    for rows, width in _SHAPES:
        x = t.randn(rows, width)
        codes, scales = rk.per_token_quant_fp8(t.there(x))
        _check(t, x, codes, scales, x.double().abs().amax(-1, keepdim=True))


@case
def per_token_group_quant(t: Trial) -> None:
    for rows, width in _SHAPES:
        for group in (64, 128):
            x = t.randn(rows, width)
            codes, scales = rk.per_token_group_quant(t.there(x), group)
            _check_groups(t, x, codes, scales, group)


@case
def silu_and_mul_quant_fp8(t: Trial) -> None:
    for rows, width in _SHAPES:
        x = t.randn(rows, 2 * width)
        codes, scales = rk.silu_and_mul_quant_fp8(t.there(x), 128)
        _check_values(t, reference.silu_and_mul(x.double()), codes, scales)


@case
def rmsnorm_quant_fp8(t: Trial) -> None:
    for rows, width in _SHAPES:
        x = t.randn(rows, width)
        weight = t.randn(width)
        codes, scales = rk.rmsnorm_quant_fp8(t.there(x), t.there(weight), 1e-6, 128)
        _check_values(t, reference.rmsnorm(x.double(), weight.double()), codes, scales)


@case
def per_token_quant_int8(t: Trial) -> None:
    for rows, width in _SHAPES:
        x = t.randn(rows, width)
        x[0] = 0
        codes, scales = rk.per_token_quant_int8(t.there(x))
        expected = reference.per_token_quant_int8(x)
        t.same(codes, expected[0], EXACT)
        t.same(scales, expected[1], EXACT)


@case
def silu_and_mul_quant_int8(t: Trial) -> None:
    for rows, width in _SHAPES:
        x = t.randn(rows, 2 * width)
        made = rk.silu_and_mul_quant_int8(t.there(x))
        _check_int8(t, reference.silu_and_mul(x.double()), *made)


@case
def rmsnorm_quant_int8(t: Trial) -> None:
    for rows, width in _SHAPES:
        x = t.randn(rows, width)
        weight = t.randn(width)
        made = rk.rmsnorm_quant_int8(t.there(x), t.there(weight), 1e-6)
        _check_int8(t, reference.rmsnorm(x.double(), weight.double()), *made)


def _check_int8(t: Trial, exact: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    largest = exact.abs().amax(-1, keepdim=True)
    rounding = ROUNDED_ONCE[t.name]
    kept = scales.cpu().double()
    t.keep(float((kept * _INT8 / largest - 1).abs().max()), 2 * rounding)
    # Half a step, and the roundings of the value and of its row's scale before.
    allowed = largest / _INT8 / 2 + 3 * rounding * largest
    t.keep(float(((codes.cpu().double() * kept - exact).abs() / allowed).max()), HALF_STEP)


def _check_groups(
    t: Trial, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, group: int
) -> None:
    parts = x.unflatten(-1, (-1, group))
    largest = parts.double().abs().amax(-1, keepdim=True)
    _check(t, parts, codes.cpu().unflatten(-1, (-1, group)), scales.cpu()[..., None], largest)


def _check(
    t: Trial, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, largest: torch.Tensor
) -> None:
    codes = codes.cpu()
    scales = scales.cpu().float()
    info = torch.finfo(codes.dtype)
    expected = (largest.clamp(min=1e-10) / info.max).expand_as(scales)
    t.keep(float((scales / expected - 1).abs().max()), SCALE)
    exact = (x.double() / scales.double()).clamp(-info.max, info.max)
    step = 2.0 ** (exact.abs().clamp(min=info.tiny).log2().floor() - _MANTISSA)
    got = codes.double()
    if bool(got.isnan().any()):
        raise Wrong("NaN codes of finite values")
    t.keep(float(((got - exact).abs() / (step / 2)).max()), HALF_STEP)


def _check_values(t: Trial, exact: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Where what is quantized is itself computed in float32, or rounded to the dtype before."""
    group = exact.shape[-1] // scales.shape[-1]
    parts = exact.unflatten(-1, (-1, group))
    values = codes.cpu().double().unflatten(-1, (-1, group)) * scales.cpu().double()[..., None]
    largest = parts.abs().amax(-1, keepdim=True)
    info = torch.finfo(codes.dtype)
    rounding = ROUNDED_ONCE[t.name]
    ratio = scales.cpu().double()[..., None] / (largest.clamp(min=1e-10) / info.max)
    t.keep(float((ratio - 1).abs().max()), 2 * rounding)
    size = parts.abs() / (largest / info.max)
    step = 2.0 ** (size.clamp(min=info.tiny).log2().floor() - _MANTISSA) * largest / info.max
    # Half a step, and the roundings of the value and of its group's scale before.
    allowed = step / 2 + 2 * rounding * (parts.abs() + parts.square().mean(-1, keepdim=True).sqrt())
    t.keep(float(((values - parts).abs() / allowed).max()), HALF_STEP)
