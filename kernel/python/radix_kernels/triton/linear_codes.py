"""Products with weights of codes in Triton: tile choice and launch."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .codes_tile import KINDS
from .linear_codes_kernel import codes_product
from .moe import CDNA_SHARED, HOPPER_SHARED, Tiles, fitted, shared_memory


class Parts(Protocol):
    """What is read of `codes_layout.CodeParts`."""

    @property
    def codes(self) -> Any: ...

    @property
    def scales(self) -> Any: ...

    @property
    def zeros(self) -> Any: ...

    @property
    def mins(self) -> Any: ...


class Form(Protocol):
    """What is read of `codes_layout.CodesForm`."""

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...

    @property
    def kind(self) -> str: ...

    @property
    def group(self) -> int: ...


def choose_tiles(
    rows: int, group: int, itemsize: int, gated: bool, shared: int = HOPPER_SHARED
) -> Tiles:
    """Few rows: narrow tiles, so that more programs read the weight. A tile's depth divides the
    group, whose scale meets its sums."""
    block_m = next((m for m in (16, 32, 64) if rows <= m), 128)
    many = block_m == 128
    block_n = 32 if block_m == 16 else 64
    if many and not gated:
        block_n = 128
    depth = 32 if itemsize == 4 else 64
    if block_m <= 32 and itemsize < 4:
        depth = 128
    tiles = Tiles(
        block_m=block_m if itemsize < 4 else min(block_m, 32),
        block_n=block_n if itemsize < 4 else 32,
        block_k=min(depth, group or depth),
        group=8,
        num_warps=8 if many else 4,
        num_stages=2 if shared <= CDNA_SHARED else 4,
    )
    # The tile of codes and, widened, that of numbers.
    matrices = 2 if gated else 1
    return fitted(tiles, matrices=matrices, itemsize=itemsize, weight_size=itemsize, shared=shared)


def linear_codes(
    x: torch.Tensor,
    parts: Parts,
    form: Form,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gate: int,
    out: torch.Tensor,
) -> None:
    """`radix_kernels.linear` and `linear_silu_and_mul` of x [M, K] and a weight in the layout
    `codes`, whose arguments are checked. gate: 0 none, 1 of two halves of the weight's rows, 2 of
    rows in turn. Reads no tensor on the host."""
    rows = x.shape[0]
    n = form.n // 2 if gate else form.n
    if rows == 0 or n == 0:
        return
    tiles = choose_tiles(rows, form.group, x.element_size(), gate != 0, shared_memory(x.device))
    programs = -(-rows // tiles.block_m) * -(-n // tiles.block_n)
    codes_product[(programs,)](
        x, parts.codes, parts.scales, parts.zeros, parts.mins, bias, residual, out,
        rows, x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0),
        N=n, K=form.k, KIND=KINDS[form.kind], GROUP=form.group,
        ZEROS=parts.zeros is not None, MINS=parts.mins is not None,
        BIAS=bias is not None, RESIDUAL=residual is not None, GATE=gate,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP_M=tiles.group,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
