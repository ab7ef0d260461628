"""Products with weights of 4 and 8 bits on a GPU: bytes, and the same product in bfloat16 or
float16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

import radix_kernels as rk

from ..harness import Case, Contender
from .quantized_peers import PeerWeight, Product

# Weight rows and columns, and numbers of tokens: QKV, gate and up (fused), down of llama3-8b.
INT4 = (
    (6144, 4096, (1, 16, 64)),
    (28672, 4096, (1, 16, 64, 256, 1024, 4096)),
    (4096, 14336, (1, 16, 64)),
)
OTHERS = ((6144, 4096, (1, 16)), (28672, 4096, (16, 64, 256)))
GATED = ((28672, 4096, (1, 16, 64)),)
# Kind: bits of a code, inputs of a group, bits of a scale.
KINDS = {"int4": (4, 128, 16), "int8": (8, 128, 16), "mxfp4": (4, 32, 8)}


def quantized(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """GPU only; the CPU's quantized weights are in the family `linear`."""
    if device.type == "cpu":
        return
    rows = [("int4", INT4, False), ("int8", OTHERS, False), ("mxfp4", OTHERS, False)]
    for kind, shapes, gated in [*rows, ("int4", GATED, True)]:
        for n, k, tokens in shapes:
            weight = _Weight(device=device, dtype=dtype, kind=kind, n=n, k=k)
            for m in tokens:
                yield _case(weight, m, gated)


@dataclass(frozen=True)
class _Weight:
    """A weight [n, k], made once for all rows; every set of inputs has a copy."""

    device: torch.device
    dtype: torch.dtype
    kind: str
    n: int
    k: int

    @property
    def bytes(self) -> float:
        bits, group, scale = KINDS[self.kind]
        return self.n * self.k * (bits + scale / group) / 8

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        bits, group, _ = KINDS[self.kind]
        codes = torch.randint(256, (self.n, self.k * bits // 8), device=self.device).to(torch.uint8)
        shape = (self.n, self.k // group)
        if self.kind == "mxfp4":
            scales = torch.randint(116, 122, shape, device=self.device).to(torch.uint8)
        else:
            scales = (torch.rand(shape, device=self.device) + 0.5).to(self.dtype) / 2**bits
        return {
            "w": codes.view(torch.int8) if bits == 8 else codes,
            "scales": scales,
            "kind": self.kind,
            "group": group,
            "dtype": self.dtype,
        }

    def packed(self) -> rk.PackedWeight:
        return rk.pack_weight(**self._arguments)

    def wide(self) -> rk.PackedWeight:
        return rk.pack_weight(torch.randn(self.n, self.k, device=self.device, dtype=self.dtype))

    @cached_property
    def peers(self) -> dict[str, PeerWeight]:
        """vLLM's forms of such a weight, by name."""
        return Product(
            device=self.device,
            dtype=self.dtype,
            kind=self.kind,
            n=self.n,
            k=self.k,
            group=KINDS[self.kind][1],
        ).weights()


def _case(weight: _Weight, m: int, gated: bool) -> Case:
    n = weight.n
    k = weight.k
    dtype = weight.dtype
    theirs = {} if gated else weight.peers

    def make() -> tuple[Any, ...]:
        x = torch.randn(m, k, device=weight.device, dtype=dtype)
        copies = {name: (each.codes.clone(), each.scales.clone()) for name, each in theirs.items()}
        return x, weight.packed(), weight.wide(), copies

    op = rk.linear_silu_and_mul if gated else rk.linear
    contenders: dict[str, Contender] = {
        "radix": lambda x, packed, wide, copies: op(x, packed),
        f"radix {str(dtype).removeprefix('torch.')}": lambda x, packed, wide, copies: op(x, wide),
    }
    for name, each in theirs.items():
        contenders[name] = lambda x, packed, wide, copies, name=name, each=each: each.multiply(
            x, *copies[name]
        )
    columns = n // 2 if gated else n
    return Case(
        op=f"{op.__name__} {weight.kind}",
        shape=f"{m}x{n}x{k}",
        dtype=dtype,
        bytes=weight.bytes + m * (columns + k) * dtype.itemsize,
        flops=2 * m * n * k,
        make_inputs=make,
        contenders=contenders,
        limit="read",
    )
