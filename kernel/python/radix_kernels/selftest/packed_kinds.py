"""Quantized weights of every kind, which the CPU library alone has: random codes, and the weight
and x that they stand for in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .bounds import LINEAR
from .trial import Trial, reference, rk

_FEATURES = 37
_INPUTS = 352
_ROWS = (1, 3, 20)
_GROUP = 32
_SUPER = 256
_FLOATS4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """`arguments` of `pack_weight`, the elements, and the inputs of x that share a scale, where it
    is quantized too."""

    arguments: dict[str, Any]
    exact: torch.Tensor
    x_group: int | None


def quantized_products(t: Trial) -> None:
    """`linear` with weights of every kind, where there are any."""
    if rk.capabilities()["backend"] != "cpu":
        return
    for kind, make in _KINDS.items():
        weight = make(t, kind)
        packed = rk.pack_weight(kind=kind, dtype=t.name, **weight.arguments)
        for rows in _ROWS:
            x = t.randn(rows, _INPUTS)
            out = t.poisoned(rows, _FEATURES)
            rk.linear(x, packed, out=out)
            t.near(out, _x(x, weight.x_group) @ weight.exact.T, LINEAR[t.name])


def _x(x: torch.Tensor, group: int | None) -> torch.Tensor:
    if group is None:
        return x.double()
    codes, scales = reference.quantize_rows(x, group)
    exact: torch.Tensor = reference.dequantize_weight(codes, scales, None, group)
    return exact


def _spread(numbers: torch.Tensor, group: int = _GROUP) -> torch.Tensor:
    """Of groups, for each of their inputs, in float64."""
    return numbers.double().repeat_interleave(group, 1)[:, :_INPUTS]


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def _groups(group: int = _GROUP) -> tuple[int, int]:
    return _FEATURES, -(-_INPUTS // group)


def _numbers(t: Trial, group: int = _GROUP) -> torch.Tensor:
    """Scales with which outputs are far from float16's largest number."""
    return (t.rand(*_groups(group)) + 0.5) / 128


def _bytes(t: Trial, kind: str) -> _Weight:
    codes = t.integers(-127, 128, _FEATURES, _INPUTS, dtype=torch.int8)
    scales = _numbers(t)
    return _Weight(
        arguments={"w": codes, "scales": scales, "group": _GROUP},
        exact=codes.double() * _spread(scales),
        x_group=_GROUP if kind == "w8a8" else None,
    )


def _nibbles(t: Trial, kind: str) -> _Weight:
    codes = t.integers(0, 16, _FEATURES, _INPUTS)
    scales = _numbers(t)
    zeros = t.integers(0, 17, *_groups(), dtype=torch.uint8)
    return _Weight(
        arguments={"w": _pairs(codes), "scales": scales, "zeros": zeros, "group": _GROUP},
        exact=(codes.double() - _spread(zeros)) * _spread(scales),
        x_group=_GROUP if kind == "w4a8" else None,
    )


def _float8(t: Trial, kind: str) -> _Weight:
    values = t.randn(_FEATURES, _INPUTS, dtype=torch.float32) * 64
    codes = values.to(torch.float8_e4m3fn)
    scales = _numbers(t)
    return _Weight(
        arguments={"w": codes, "scales": scales, "group": _GROUP},
        exact=codes.double() * _spread(scales),
        x_group=None,
    )


def _float4(t: Trial, kind: str) -> _Weight:
    codes = t.integers(0, 16, _FEATURES, _INPUTS)
    powers = t.integers(120, 134, *_groups(), dtype=torch.uint8)
    return _Weight(
        arguments={"w": _pairs(codes), "scales": powers},
        exact=_FLOATS4.double()[codes] * torch.exp2(_spread(powers) - 127),
        x_group=_GROUP,
    )


def _supers(t: Trial, kind: str) -> _Weight:
    least, most, group = {"q4_k": (0, 16, 32), "q5_k": (0, 32, 32), "q6_k": (-32, 32, 16)}[kind]
    codes = t.integers(least, most, _FEATURES, _INPUTS)
    scales = _numbers(t, _SUPER)
    mins = -_numbers(t, _SUPER)
    sub_scales = t.integers(-64, 64, *_groups(group), dtype=torch.int8)
    sub_mins = t.integers(0, 64, *_groups(group), dtype=torch.uint8)
    exact = codes.double() * _spread(scales, _SUPER) * _spread(sub_scales, group)
    return _Weight(
        arguments={
            "w": _pairs(codes) if kind == "q4_k" else codes.to(torch.int8),
            "scales": scales,
            "mins": mins,
            "sub_scales": sub_scales,
            "sub_mins": sub_mins,
        },
        exact=exact + _spread(mins, _SUPER) * _spread(sub_mins, group),
        x_group=_SUPER,
    )


_KINDS: dict[str, Callable[[Trial, str], _Weight]] = {
    "int8": _bytes,
    "w8a8": _bytes,
    "int4": _nibbles,
    "w4a8": _nibbles,
    "fp8": _float8,
    "mxfp4": _float4,
    "q4_k": _supers,
    "q5_k": _supers,
    "q6_k": _supers,
}
