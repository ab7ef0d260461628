"""Experts over weights of codes in Triton: tile choice and launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from ..gating import PLAIN, Gating
from ..reference.moe import moe_align_block_size
from .codes_tile import KINDS
from .experts_codes_kernel import codes_expert_product
from .linear_codes import Form, Parts, choose_tiles
from .moe import FEW_PAIRS, HOPPER_SHARED, Align, Pairs, Tiles, shared_memory, sort_pairs
from .moe_kernel import combine


class Product(Protocol):
    """What is read of `codes_layout.CodeProduct`."""

    @property
    def parts(self) -> Parts: ...

    @property
    def form(self) -> Form: ...

    @property
    def bias(self) -> torch.Tensor | None: ...


def choose_expert_tiles(
    pairs: int, experts: int, groups: tuple[int, int], itemsize: int, shared: int = HOPPER_SHARED
) -> tuple[Tiles, Tiles]:
    """Tiles of the up and the down product: as `linear_codes` takes them for twice the mean number
    of pairs of an expert, since tokens do not spread evenly. groups: inputs that share a scale in
    both."""
    rows = FEW_PAIRS if pairs <= FEW_PAIRS else -(-2 * pairs // experts)
    up = choose_tiles(rows, groups[0], itemsize, gated=True, shared=shared)
    down = choose_tiles(rows, groups[1], itemsize, gated=False, shared=shared)
    return up, replace(down, block_m=up.block_m)


def fused_experts_codes(
    hidden_states: torch.Tensor,
    first: Product,
    second: Product,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
    gating: Gating = PLAIN,
    align: Align = moe_align_block_size,
) -> None:
    """See `radix_kernels.fused_experts_packed`, which has checked the arguments.

    first: gate and up, [E, 2 I, H]; second: [E, H, I]. align: as in `fused_experts`. Reads no
    tensor on the host, so a CUDA graph may capture it.
    """
    x = hidden_states
    tokens, topk = topk_ids.shape
    hidden = x.shape[1]
    if topk_ids.numel() == 0 or hidden == 0:
        out.zero_()
        return
    experts = int(first.parts.codes.shape[0])
    groups = (first.form.group, second.form.group)
    up, down = choose_expert_tiles(
        topk_ids.numel(), experts, groups, x.element_size(), shared_memory(x.device)
    )
    ids = topk_ids.contiguous()
    pairs = sort_pairs(ids, experts, expert_map, up.block_m, align)
    activated = x.new_empty((pairs.count, second.form.k))
    products = x.new_empty((pairs.count, hidden))
    _launch(x, first, activated, pairs, up, topk=topk, gating=gating)
    _launch(activated, second, products, pairs, down, topk=1, gating=None)
    block = min(1024, 1 << (hidden - 1).bit_length())
    combine[(tokens, -(-hidden // block))](
        products, topk_weights.contiguous(), ids, expert_map, out, out.stride(0),
        HIDDEN=hidden, NUM_EXPERTS=pairs.named_experts, LOCALS=experts, TOPK=topk,
        MAPPED=expert_map is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _launch(
    source: torch.Tensor,
    product: Product,
    target: torch.Tensor,
    pairs: Pairs,
    tiles: Tiles,
    *,
    topk: int,
    gating: Gating | None,
) -> None:
    """target [pairs, N] = the pairs' rows of source, each by its expert's codes. topk: how many
    pairs share a row of source. gating: what becomes of the two halves, gate and up, or None."""
    n = target.shape[1]
    parts = product.parts
    act = gating or PLAIN
    codes_expert_product[(pairs.blocks * -(-n // tiles.block_n),)](
        source, parts.codes, parts.scales, parts.zeros, parts.mins, product.bias,
        pairs.topk_ids, pairs.expert_map, *pairs.order, target,
        pairs.count, source.stride(0), target.stride(0), parts.codes.stride(0),
        K=product.form.k, N=n, KIND=KINDS[product.form.kind], GROUP=product.form.group,
        SCALE_SIZE=parts.scales.element_size(),
        ZEROS=parts.zeros is not None, MINS=parts.mins is not None,
        NUM_EXPERTS=pairs.named_experts, LOCALS=int(parts.codes.shape[0]), TOPK=topk,
        GATED=gating is not None, ACTIVATION=act.number, ALPHA=act.alpha, LIMIT=act.limit,
        BIASED=product.bias is not None, FEW=pairs.are_few, MAPPED=pairs.expert_map is not None,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        GROUP_M=tiles.group, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
