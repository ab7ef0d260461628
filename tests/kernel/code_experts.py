"""Experts of 4-bit codes for the tests: random ones, what they stand for, and Hopper's layout
written a second time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import radix_kernels as rk
from tests.kernel.experts_cases import Experts
from tests.kernel.helpers import integers

# Of e2m1, by code.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
_TILE = 64


@dataclass(frozen=True, kw_only=True)
class CodeKind:
    """What a weight of codes is."""

    kind: str
    group: int
    scale_dtype: torch.dtype = torch.bfloat16
    zeros: bool = False


@dataclass(frozen=True, kw_only=True)
class CodeWeight:
    """codes: uint8 [N, K], one in a byte; scales [N, G]; zeros uint8 [N, G] or None."""

    form: CodeKind
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def values(self) -> torch.Tensor:
        """What they stand for, in float64: [N, K]."""
        k = self.codes.shape[1]

        def wide(numbers: torch.Tensor) -> torch.Tensor:
            return numbers.double().repeat_interleave(self.form.group, 1)[:, :k]

        if self.form.kind == "mxfp4":
            return E2M1[self.codes.long()] * torch.exp2(wide(self.scales) - 127)
        zeros = 8 if self.zeros is None else wide(self.zeros)
        return (self.codes.double() - zeros) * wide(self.scales)

    def pack(self, dtype: torch.dtype) -> rk.PackedWeight:
        """By the library."""
        padded = torch.nn.functional.pad(self.codes, (0, self.codes.shape[1] % 2))
        pairs = padded[:, ::2] | padded[:, 1::2] << 4
        return rk.pack_weight(
            pairs,
            self.scales,
            self.form.kind,
            zeros=self.zeros,
            group=self.form.group,
            dtype=dtype,
        )

    def in_fragments(self, dtype: torch.dtype) -> rk.PackedWeight:
        """As docs/kernels/quantized.md says that Hopper's layout is, on the GPU."""
        parts = [_fragments(self.codes, 0 if self.form.kind == "mxfp4" else 8)]
        parts.append(_by_tile(self.scales))
        if self.zeros is not None:
            parts.append(_by_tile(self.zeros))
        n, k = self.codes.shape
        return rk.PackedWeight(
            data=torch.cat(parts).cuda(),
            layout="fragments64",
            n=n,
            k=k,
            dtype=str(dtype).removeprefix("torch."),
            kind=self.form.kind,
            group=self.form.group,
            scale_dtype=str(self.scales.dtype).removeprefix("torch."),
            zeros=self.zeros is not None,
        )


def _fragments(codes: torch.Tensor, zero: int) -> torch.Tensor:
    """Codes [N, K] as bytes of tiles: in a word the nibbles are, from the lowest, rows g and g + 8
    of columns 2 t, of columns 2 t + 8, and the same of the columns behind those."""
    n, k = codes.shape
    full = torch.nn.functional.pad(codes, (0, -k % _TILE, 0, -n % _TILE), value=zero)
    tiles = full.view(full.shape[0] // 64, 4, 2, 8, full.shape[1] // 64, 4, 2, 4, 2)
    # row tile, strip, upper rows, g, k tile, step, upper columns, t, odd column
    nibbles = tiles.permute(0, 4, 1, 3, 7, 5, 8, 6, 2).reshape(-1, 2)
    return nibbles[:, 0] | nibbles[:, 1] << 4


def _by_tile(numbers: torch.Tensor) -> torch.Tensor:
    """[N, G] as bytes of [N / 64, G, 64]."""
    full = torch.nn.functional.pad(numbers, (0, 0, 0, -numbers.shape[0] % _TILE))
    tiles = full.view(-1, _TILE, numbers.shape[1]).transpose(1, 2).contiguous()
    return tiles.view(-1).view(torch.uint8)


def random_weight(n: int, k: int, form: CodeKind, rng: torch.Generator) -> CodeWeight:
    """Values around 1 / sqrt(K)."""
    groups = -(-k // form.group)
    codes = integers(0, 16, (n, k), rng).to(torch.uint8)
    zeros = integers(0, 17, (n, groups), rng).to(torch.uint8) if form.zeros else None
    if form.kind == "mxfp4":
        middle = 126 - round(torch.tensor(float(k)).log2().item() / 2)
        scales = (middle + integers(-3, 2, (n, groups), rng)).to(torch.uint8)
    else:
        spread = torch.rand(n, groups, generator=rng) + 0.2
        scales = (spread / (6 * k**0.5)).to(form.scale_dtype)
    return CodeWeight(form=form, codes=codes, scales=scales, zeros=zeros)


@dataclass(frozen=True, kw_only=True)
class CodeExperts:
    """The weights of all experts, and a call on them."""

    w1: tuple[CodeWeight, ...]
    w2: tuple[CodeWeight, ...]
    case: Experts

    def pack(self, device: str) -> rk.PackedExperts:
        """On the GPU in Hopper's layout."""
        dtype = self.case.x.dtype
        if device == "cpu":
            return rk.PackedExperts(
                w1=tuple(w.pack(dtype) for w in self.w1), w2=tuple(w.pack(dtype) for w in self.w2)
            )
        return rk.PackedExperts(
            w1=tuple(w.in_fragments(dtype) for w in self.w1),
            w2=tuple(w.in_fragments(dtype) for w in self.w2),
        )


def random_experts(
    shape: tuple[int, int, int, int, int],
    form: CodeKind,
    x: torch.Tensor,
    rng: torch.Generator,
    named: int | None = None,
) -> CodeExperts:
    """shape: tokens, experts, topk, hidden, inter; x: [tokens, hidden]."""
    tokens, experts, topk, hidden, inter = shape
    w1 = tuple(random_weight(2 * inter, hidden, form, rng) for _ in range(experts))
    w2 = tuple(random_weight(hidden, inter, form, rng) for _ in range(experts))
    ids = torch.empty(tokens, topk, dtype=torch.int32)
    for token in range(tokens):
        ids[token] = torch.randperm(named or experts, generator=rng)[:topk]
    case = Experts(
        x=x,
        w1=torch.stack([w.values() for w in w1]),
        w2=torch.stack([w.values() for w in w2]),
        weights=torch.rand(tokens, topk, generator=rng),
        ids=ids,
        options={},
    )
    return CodeExperts(w1=w1, w2=w2, case=case)
