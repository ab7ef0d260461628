"""Random quantized weights as `pack_weight` takes them, and the float64 of what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import radix_kernels as rk
from tests.kernel.helpers import integers

# 4-bit floats (e2m1), by code.
FLOAT4 = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64
)
# (kind, group, what codes are counted from)
FORMS = [
    *[("int4", group, origin) for group in (0, 32, 64, 128) for origin in ("", "zeros")],
    ("int4", 32, "mins"),
    *[("int8", group, "") for group in (0, 16, 32, 64, 128)],
    ("int8", 32, "mins"),
    ("mxfp4", 32, ""),
]


@dataclass
class CodeWeight:
    """arguments: of `pack_weight`, less dtype; value: [N, K] in float64."""

    arguments: dict[str, Any]
    value: torch.Tensor

    def pack(self, dtype: torch.dtype, device: str = "cpu") -> rk.PackedWeight:
        moved = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in self.arguments.items()
        }
        return rk.pack_weight(**moved, dtype=dtype)


def random_weight(
    kind: str, group: int, origin: str, n: int, k: int, rng: torch.Generator
) -> CodeWeight:
    """Elements around 1 / sqrt(k); an even k where two codes are in a byte."""
    groups = -(-k // group) if group else 1
    arguments: dict[str, Any] = {"kind": kind, "group": group}

    def spread(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.double().repeat_interleave(group or k, 1)[:, :k]

    if kind == "int8":
        codes = integers(-128, 128, (n, k), rng)
        arguments["w"] = codes.to(torch.int8)
    else:
        codes = integers(0, 16, (n, k), rng)
        arguments["w"] = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if kind == "mxfp4":
        powers = integers(118, 124, (n, groups), rng).to(torch.uint8)
        arguments["scales"] = powers
        return CodeWeight(arguments, FLOAT4[codes] * spread(torch.exp2(powers.double() - 127)))
    size = 74 if kind == "int8" else 4.6
    drawn = (torch.rand(n, groups, generator=rng) + 0.5) / size / k**0.5
    scales = drawn.to([torch.bfloat16, torch.float16, torch.float32][(n + k) % 3])
    arguments["scales"] = scales
    value = codes.double()
    if origin == "zeros":
        zeros = integers(0, 17, (n, groups), rng).to(torch.uint8)
        arguments["zeros"] = zeros
        value -= spread(zeros)
    elif kind == "int4" and not origin:
        value -= 8
    value *= spread(scales)
    if origin == "mins":
        mins = (torch.randn(n, groups, generator=rng) / k**0.5).to(scales.dtype)
        arguments["mins"] = mins
        value += spread(mins)
    return CodeWeight(arguments, value)
