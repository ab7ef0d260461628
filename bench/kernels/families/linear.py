"""Dense products of real models; on the CPU with quantized weights too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F

import radix_kernels as rk

from ..harness import ROTATED_BYTES, Case, randn

TOKENS = {"cpu": (1, 8, 32, 512), "cuda": (1, 64, 4096)}
# qkv, down, gate and up, o of Qwen3-0.6B.
SHAPES = ((4096, 1024), (1024, 3072), (6144, 1024), (1024, 2048))
# The vocabulary matrix of Qwen3-0.6B, and the rows that draw from it.
VOCABULARY = (151_936, 1024)
DRAWS = (1, 32)
# Bytes an element with its share of scales.
QUANTIZED = {
    "w8a8": (0, 1.0),
    "int8": (0, 1.0),
    "fp8": (0, 1.0),
    "w4a8": (64, 0.5 + 2 / 64),
    "int4": (64, 0.5 + 2 / 64),
}
# Types of GGUF files: the kind they are held as, bytes of a block, its inputs, bytes an element.
GGUF_TYPES = {
    "Q4_1": ("w4a8", 20, 32, 0.5 + 4 / 32),
    "Q4_K": ("q4_k", 144, 256, 148 / 256),
    "Q5_K": ("q5_k", 176, 256, 180 / 256),
    "Q6_K": ("q6_k", 210, 256, 212 / 256),
}
# What the types in super-blocks are beside: the same codes with a float32 scale for each group.
BY_GROUP = {"Q4_K": "w4a8", "Q5_K": "w8a8", "Q6_K": "w8a8"}

T = TypeVar("T")


def linear(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Packed weights, dense and (on the CPU) quantized, and the greedy draw from the vocabulary."""
    kinds = (None, *QUANTIZED, *GGUF_TYPES) if device.type == "cpu" else (None,)
    for n, k in SHAPES:
        weight = _Weight(device=device, dtype=dtype, n=n, k=k)
        for m in TOKENS[device.type]:
            for kind in kinds:
                yield _case(weight, m, kind)
    if device.type == "cpu":
        for m in DRAWS:
            yield from (_greedy_case(device, dtype, m, kind) for kind in (None, "w8a8"))


class _Weight:
    """A weight [n, k]. `dense` and `packed` hand out copies in turn, which all rows share: together
    they are larger than the caches, and they are made and packed once."""

    def __init__(self, device: torch.device, dtype: torch.dtype, n: int, k: int) -> None:
        self.device = device
        self.dtype = dtype
        self.n = n
        self.k = k
        self._source = randn(n, k, device=device, dtype=dtype) / k**0.5
        self.dense = _in_turn(self._source.clone, self._source.nbytes)
        self._packed: dict[tuple[str | None, bool], Iterator[rk.PackedWeight]] = {}

    def packed(self, kind: str | None, *, by_group: bool = False) -> rk.PackedWeight:
        key = kind, by_group
        if key not in self._packed:
            weight = self._pack(kind, by_group)
            self._packed[key] = _in_turn(
                lambda: replace(weight, data=weight.data.clone()), weight.nbytes
            )
        return next(self._packed[key])

    def _pack(self, kind: str | None, by_group: bool) -> rk.PackedWeight:
        if kind in GGUF_TYPES:
            packed_kind, size, inputs, _ = GGUF_TYPES[kind]
            blocks = torch.randint(256, (self.n, self.k // inputs * size), dtype=torch.uint8)
            arguments = rk.unpack_gguf(blocks, kind, in_super_blocks=not by_group)
            arguments["kind"] = BY_GROUP[kind] if by_group else packed_kind
            arguments["scales"].fill_(0.01)  # random bits are no scales
            if arguments["mins"] is not None:
                arguments["mins"].fill_(-0.1)
            return rk.pack_weight(**arguments, dtype=self.dtype)
        group = None if kind is None else QUANTIZED[kind][0]
        return rk.pack_weight(self._source, kind=kind, group=group)


def _element_bytes(kind: str | None, dtype: torch.dtype) -> float:
    """Bytes of a weight's element, with its share of scales."""
    if kind is None:
        return dtype.itemsize
    return GGUF_TYPES[kind][3] if kind in GGUF_TYPES else QUANTIZED[kind][1]


def _in_turn(copy: Callable[[], T], size: int) -> Iterator[T]:
    """Endless, of as many copies of `size` bytes as are rotated."""
    return itertools.cycle(copy() for _ in range(max(ROTATED_BYTES // size + 1, 2)))


def _greedy_case(device: torch.device, dtype: torch.dtype, m: int, kind: str | None) -> Case:
    """The greedy draw from the vocabulary beside the product that writes its logits and the draw
    from those."""
    n, k = VOCABULARY
    size = _element_bytes(kind, dtype)

    def make() -> tuple[object, ...]:
        weight = rk.pack_weight(randn(n, k, device=device, dtype=dtype) / k**0.5, kind=kind)
        zeros = torch.zeros(m)
        position = torch.zeros(m, dtype=torch.int64)
        settings = zeros, zeros.int() - 1, zeros + 1, zeros, position, position
        return randn(m, k, device=device, dtype=dtype), weight, settings

    def separate(
        x: torch.Tensor, weight: rk.PackedWeight, settings: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        return rk.top_k_top_p_sampling(rk.linear(x, weight, out_dtype=torch.float32), *settings)

    return Case(
        op=f"linear_argmax {kind or ''}".strip(),
        shape=f"{m}x{n}x{k}",
        dtype=dtype,
        bytes=n * k * size + m * k * dtype.itemsize,
        flops=2 * m * n * k,
        make_inputs=make,
        contenders={
            "radix": lambda x, weight, _: rk.linear_argmax(x, weight),
            "linear + draw": separate,
        },
        limit="read",
    )


def _case(weight: _Weight, m: int, kind: str | None) -> Case:
    n = weight.n
    k = weight.k
    dtype = weight.dtype
    size = _element_bytes(kind, dtype)

    def make() -> tuple[object, ...]:
        return (
            randn(m, k, device=weight.device, dtype=dtype),
            next(weight.dense),
            weight.packed(kind),
            weight.packed(kind, by_group=True) if kind in BY_GROUP else None,
        )

    contenders = {
        "radix": lambda x, w, p, g: rk.linear(x, p),
        "torch": lambda x, w, p, g: F.linear(x, w),
    }
    if kind in BY_GROUP:
        contenders["by group"] = lambda x, w, p, g: rk.linear(x, g)

    return Case(
        op=f"linear {kind or ''}".strip(),
        shape=f"{m}x{n}x{k}",
        dtype=dtype,
        bytes=n * k * size + m * (n + k) * dtype.itemsize,
        flops=2 * m * n * k,
        make_inputs=make,
        contenders=contenders,
    )
