"""Random weights in super-blocks, and what `linear` should make of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import radix_kernels as rk
from radix_kernels import reference
from tests.kernel.helpers import integers

SUPER = 256
# Each kind: the least code, how many there are, and the inputs that share a sub-scale.
KINDS = {"q4_k": (0, 16, 32), "q5_k": (0, 32, 32), "q6_k": (-32, 64, 16)}


@dataclass(kw_only=True)
class SuperWeight:
    """The arguments of `pack_weight`, and the weight as a float64 matrix."""

    kind: str
    codes: torch.Tensor  # [N, K], any integers
    scales: torch.Tensor
    sub_scales: torch.Tensor
    mins: torch.Tensor | None = None
    sub_mins: torch.Tensor | None = None

    @classmethod
    def random(cls, kind, n, k, rng, *, has_mins, scale_dtype=torch.float16) -> SuperWeight:
        least, count, group = KINDS[kind]
        supers = -(-k // SUPER)
        groups = -(-k // group)

        def numbers(offset):
            return ((torch.rand((n, supers), generator=rng) - offset) / 512).to(scale_dtype)

        def small(low, high, dtype):
            return integers(low, high, (n, groups), rng).to(dtype)

        return cls(
            kind=kind,
            codes=integers(least, least + count, (n, k), rng),
            scales=numbers(0.4),
            sub_scales=small(-128, 128, torch.int8),
            mins=numbers(0.8) if has_mins else None,
            sub_mins=small(0, 256, torch.uint8) if has_mins else None,
        )

    @property
    def stored(self) -> torch.Tensor:
        """The codes as `pack_weight` takes them; a last one of an odd K has 0 beside it."""
        if self.kind != "q4_k":
            return self.codes.to(torch.int8)
        padded = torch.nn.functional.pad(self.codes, (0, self.codes.shape[1] % 2))
        return (padded[:, ::2] | padded[:, 1::2] << 4).to(torch.uint8)

    def pack(self, dtype=torch.bfloat16) -> rk.PackedWeight:
        return rk.pack_weight(
            self.stored,
            self.scales,
            self.kind,
            mins=self.mins,
            sub_scales=self.sub_scales,
            sub_mins=self.sub_mins,
            dtype=dtype,
        )

    def value(self) -> torch.Tensor:
        group = KINDS[self.kind][2]

        def flat(numbers, small):
            wide = numbers.double().repeat_interleave(SUPER // group, 1)
            return wide[:, : small.shape[1]] * small.double()

        scales = flat(self.scales, self.sub_scales)
        mins = None if self.mins is None else flat(self.mins, self.sub_mins)
        return reference.dequantize_weight(self.codes, scales, None, group, mins)


def rounded_x(x: torch.Tensor) -> torch.Tensor:
    """x as these kinds take it, in float64."""
    codes, scales = reference.quantize_rows(x, SUPER)
    return reference.dequantize_weight(codes, scales, None, SUPER)
