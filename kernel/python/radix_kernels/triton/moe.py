"""Fused experts in Triton: tile choice and launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton

from ..gating import PLAIN, Gating
from ..reference.moe import moe_align_block_size, quantized_activations
from .float8_formats import multiplies
from .moe_kernel import combine, product

Align = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

# Up to this many pairs a batch is not sorted: every product sees all of them as its rows. The
# matrix unit has no fewer; with more, each expert's product would be as high as the whole batch.
FEW_PAIRS = 16
# Bytes of shared memory that a program may have.
HOPPER_SHARED = 232448
CDNA_SHARED = 65536


@dataclass(frozen=True)
class Tiles:
    """Compile-time choices of one product: rows (pairs), columns, depth; blocks of rows per group;
    see moe_kernel."""

    block_m: int
    block_n: int
    block_k: int
    group: int = 1
    swap: bool = False
    num_warps: int = 4
    num_stages: int = 3


def choose_tiles(
    pairs: int, experts: int, itemsize: int, weight_size: int, shared: int = HOPPER_SHARED
) -> tuple[Tiles, Tiles]:
    """Tiles of the up and the down product, by the mean number of pairs per expert.

    Few rows: weights stream through shared memory, so a stage holds 32 to 128 rows of them by 128
    elements, and several programs share a multiprocessor. Many rows: 128 x 256 sums a program. The
    up product has two tiles of weights. FP8's were measured on an H200, the others follow from
    counting (docs/kernels/notes/moe.md). shared: bytes that a program may have; pipelines get
    shorter to fit.
    """
    if pairs <= FEW_PAIRS:
        rows = FEW_PAIRS
    else:
        # Twice the mean, since tokens do not spread evenly.
        rows = next((m for m in (16, 32, 64) if 2 * pairs <= m * experts), 128)
    up = Tiles(block_m=rows, block_n=64, block_k=64)
    if itemsize == 4:
        up = replace(up, block_n=32, block_k=32, num_stages=2)
        down = up
    elif shared <= CDNA_SHARED:
        up = replace(up, group=4, num_stages=2)
        down = up
    elif pairs <= FEW_PAIRS:
        up = replace(up, block_n=32, block_k=128, num_stages=4)
        down = up
    elif rows <= 32:
        up = replace(up, block_k=128)
        down = replace(up, block_n=128)
    elif rows == 64:
        up = replace(up, num_stages=4)
        down = replace(up, block_n=128)
    elif weight_size == itemsize:
        up = replace(up, block_n=128, group=16, num_warps=8, num_stages=4)
        down = replace(up, block_n=256)
    else:  # widening and scaling FP8 takes registers
        up = replace(up, block_k=128, group=16, num_warps=8)
        down = replace(up, block_k=64, num_stages=4)
    return (
        fitted(up, matrices=2, itemsize=itemsize, weight_size=weight_size, shared=shared),
        fitted(down, matrices=1, itemsize=itemsize, weight_size=weight_size, shared=shared),
    )


def fitted(tiles: Tiles, matrices: int, itemsize: int, weight_size: int, shared: int) -> Tiles:
    """As many stages as there is shared memory for, two at least."""
    stage = tiles.block_k * (tiles.block_m * itemsize + matrices * tiles.block_n * weight_size)
    return replace(tiles, num_stages=max(2, min(tiles.num_stages, shared // stage)))


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w1_scale: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
    use_fp8_w8a8: bool = False,
    align: Align = moe_align_block_size,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    gating: Gating = PLAIN,
) -> None:
    """See `radix_kernels.fused_experts`, which has checked the arguments.

    align: what sorts the pairs of a large batch by expert, the public op `moe_align_block_size` or
    its reference. Reads no tensor on the host, so a CUDA graph may capture it.
    """
    pairs = topk_ids.numel()
    if pairs == 0 or hidden_states.shape[1] == 0:
        out.zero_()
        return
    up, down = choose_tiles(
        pairs,
        w1.shape[0],
        hidden_states.element_size(),
        w1.element_size(),
        shared_memory(w1.device),
    )
    run(
        hidden_states, w1, w2, topk_weights, topk_ids, w1_scale, w2_scale, expert_map, out,
        up, down, use_fp8_w8a8, align=align, bias1=bias1, bias2=bias2, gating=gating,
    )  # fmt: skip


def run(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w1_scale: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
    up: Tiles,
    down: Tiles,
    use_fp8_w8a8: bool = False,
    align: Align = moe_align_block_size,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    gating: Gating = PLAIN,
) -> None:
    """`fused_experts` by given tiles; both products have the same rows."""
    tokens, topk = topk_ids.shape
    hidden = x.shape[1]
    fp8 = w1.dtype
    pairs = sort_pairs(topk_ids, w1.shape[0], expert_map, up.block_m, align)
    activated = x.new_empty((pairs.count, w2.shape[2]))
    products = x.new_empty((pairs.count, hidden))
    # Quantised activations are widened again: the products are of the numbers that they stand for.
    source = _quantized(x, fp8) if use_fp8_w8a8 else x
    first = _Weights(w=w1, scale=w1_scale, bias=bias1)
    _launch_product(source, first, activated, pairs, up, topk=topk, gating=gating)
    source = _quantized(activated, fp8) if use_fp8_w8a8 else activated
    second = _Weights(w=w2, scale=w2_scale, bias=bias2)
    _launch_product(source, second, products, pairs, down, topk=1, gating=None)
    block = min(1024, 1 << (hidden - 1).bit_length())
    combine[(tokens, -(-hidden // block))](
        products, topk_weights, topk_ids, expert_map, out, out.stride(0),
        HIDDEN=hidden, NUM_EXPERTS=pairs.named_experts, LOCALS=w1.shape[0], TOPK=topk,
        MAPPED=expert_map is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """One product's matrices [E, N or 2 N, K], their scales and the biases [E, N or 2 N], or None
    for none."""

    w: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The (token, place) pairs of a batch, sorted by expert in blocks unless they are few.

    order: what `moe_align_block_size` returns, None three times where the pairs are not sorted.
    """

    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    named_experts: int
    blocks: int
    order: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | tuple[None, None, None]

    @property
    def count(self) -> int:
        return self.topk_ids.numel()

    @property
    def are_few(self) -> bool:
        return self.order[0] is None


def sort_pairs(
    topk_ids: torch.Tensor,
    experts: int,
    expert_map: torch.Tensor | None,
    block_m: int,
    align: Align,
) -> Pairs:
    named = experts if expert_map is None else expert_map.shape[0]
    count = topk_ids.numel()
    if count <= FEW_PAIRS:
        return Pairs(
            topk_ids=topk_ids,
            expert_map=expert_map,
            named_experts=named,
            blocks=count,
            order=(None, None, None),
        )
    order = align(topk_ids, named, block_m, expert_map=expert_map)
    return Pairs(
        topk_ids=topk_ids,
        expert_map=expert_map,
        named_experts=named,
        blocks=order[1].shape[0],
        order=order,
    )


def _launch_product(
    source: torch.Tensor,
    weights: _Weights,
    target: torch.Tensor,
    pairs: Pairs,
    tiles: Tiles,
    *,
    topk: int,
    gating: Gating | None,
) -> None:
    """target [pairs, N] = the pairs' rows of source, each by its expert's matrix of weights. topk:
    how many pairs share a row of source. gating: what becomes of the two halves, gate and up, or
    None.
    """
    n = target.shape[1]
    weight = weights.w
    scale = weights.scale
    act = gating or PLAIN
    fp8 = weight.dtype
    widen = weight.element_size() == 1 and not multiplies(weight.device, fp8)
    if widen:
        weight = weight.view(torch.uint8)
    product[(pairs.blocks * -(-n // tiles.block_n),)](
        source, weight, scale, weights.bias, pairs.topk_ids, pairs.expert_map, *pairs.order,
        target, pairs.count, source.stride(0), target.stride(0),
        K=source.shape[1], N=n, NUM_EXPERTS=pairs.named_experts, LOCALS=weight.shape[0],
        TOPK=topk, GATED=gating is not None, ACTIVATION=act.number, ALPHA=act.alpha,
        LIMIT=act.limit, BIASED=weights.bias is not None,
        FEW=pairs.are_few, MAPPED=pairs.expert_map is not None,
        SCALE=_scale_kind(scale), WIDEN=widen, FNUZ=fp8 == torch.float8_e4m3fnuz,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        GROUP=tiles.group, SWAP=tiles.swap,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _scale_kind(scale: torch.Tensor | None) -> int:
    """0 none, 1 one per expert, 2 one per block of 128 x 128."""
    if scale is None:
        return 0
    return 1 if scale.ndim == 1 else 2


def _quantized(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    return quantized_activations(x.float(), fp8).to(x.dtype)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return HOPPER_SHARED  # Triton's interpreter
    if torch.version.hip:
        return CDNA_SHARED
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
