"""Packed weights of 4 and 8 bits as a GPU takes them: random ones, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.kernel.code_weights import FLOAT4
from tests.kernel.helpers import integers


@dataclass(frozen=True)
class Form:
    """A kind of weight. group: inputs that share a scale, 0 for whole rows."""

    kind: str
    group: int
    scales: torch.dtype
    zeros: bool = False

    def __str__(self) -> str:
        zeros = "-zeros" if self.zeros else ""
        return f"{self.kind}-{self.group}-{str(self.scales).removeprefix('torch.')}{zeros}"


def make_form(kind: str, group: int, scales: torch.dtype, *, zeros: bool = False) -> Form:
    return Form(kind=kind, group=group, scales=scales, zeros=zeros)


# Every group, with zero points and without; every dtype of scales.
FORMS = [
    make_form("int4", 32, torch.float16),
    make_form("int4", 32, torch.float32, zeros=True),
    make_form("int4", 64, torch.bfloat16),
    make_form("int4", 64, torch.float16, zeros=True),
    make_form("int4", 128, torch.float32),
    make_form("int4", 128, torch.bfloat16, zeros=True),
    make_form("int4", 0, torch.float16),
    make_form("int4", 0, torch.bfloat16, zeros=True),
    make_form("int8", 32, torch.float16),
    make_form("int8", 64, torch.bfloat16),
    make_form("int8", 128, torch.float32),
    make_form("int8", 0, torch.float32),
    make_form("mxfp4", 32, torch.uint8),
]


@dataclass(frozen=True)
class Weight:
    """A random weight [n, k]. arguments: as `pack_weight` takes it; codes: what scales multiply,
    float64; scales, float64, and value, their product: [n, k]."""

    arguments: dict[str, Any] = field(repr=False)
    codes: torch.Tensor = field(repr=False)
    scales: torch.Tensor = field(repr=False)

    @property
    def value(self) -> torch.Tensor:
        return self.codes * self.scales


def random_weight(form: Form, n: int, k: int, rng: torch.Generator) -> Weight:
    """Codes from end to end of their range. k is even where two share a byte."""
    groups = -(-k // form.group) if form.group else 1
    scales = _scales(form, n, groups, rng)
    zeros = None
    if form.kind == "int8":
        codes = integers(-128, 128, (n, k), rng)
        stored = codes.to(torch.int8)
        elements = codes.double()
    else:
        codes = integers(0, 16, (n, k), rng)
        stored = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        if form.zeros:
            zeros = integers(0, 17, (n, groups), rng).to(torch.uint8)
        counted_from = 8 if zeros is None else _spread_over(zeros.long(), form, k)
        elements = FLOAT4[codes] if form.kind == "mxfp4" else (codes - counted_from).double()
    wide = torch.exp2(scales.double() - 127) if form.kind == "mxfp4" else scales.double()
    return Weight(
        arguments={
            "w": stored,
            "scales": scales,
            "kind": form.kind,
            "zeros": zeros,
            "group": form.group,
        },
        codes=elements,
        scales=_spread_over(wide, form, k),
    )


def _scales(form: Form, n: int, groups: int, rng: torch.Generator) -> torch.Tensor:
    if form.kind == "mxfp4":
        return integers(118, 124, (n, groups), rng).to(torch.uint8)
    size = 0.05 if form.kind == "int4" else 0.004
    return ((torch.rand((n, groups), generator=rng) + 0.5) * size).to(form.scales)


def _spread_over(of_groups: torch.Tensor, form: Form, k: int) -> torch.Tensor:
    """[n, groups] as [n, k]."""
    return of_groups.repeat_interleave(form.group or k, 1)[:, :k]
