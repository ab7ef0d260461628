"""Fused experts in Triton: tile choice and launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton

from ..reference.moe import quantized_activations
from .float8_formats import multiplies
from .moe_kernel import combine, product

# Up to this many pairs a batch is not sorted: every product sees all of them as its rows.
FEW_PAIRS = 64
# Bytes of shared memory that a program may have.
HOPPER_SHARED, CDNA_SHARED = 232448, 65536


@dataclass(frozen=True)
class Tiles:
    """Compile-time choices of one product: rows (pairs), columns, depth; blocks of rows a group;
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
    """Tiles of the up and the down product, by the mean number of pairs an expert has.

    Few rows: weights stream through shared memory, so a stage holds 32 to 128 rows of them by 128
    elements, and several programs share a multiprocessor. Many rows: 128 x 256 sums a program. The
    up product has two tiles of weights. FP8's were measured on an H200, the others follow from
    counting (docs/kernels/moe.md). shared: bytes that a program may have; pipelines get shorter to
    fit.
    """
    if pairs <= FEW_PAIRS:
        rows = max(16, 1 << (pairs - 1).bit_length())
    else:
        # Twice the mean, since tokens do not spread evenly.
        rows = next((m for m in (16, 32, 64) if 2 * pairs <= m * experts), 128)
    if itemsize == 4:
        up = down = Tiles(rows, 32, 32, num_stages=2)
    elif shared <= CDNA_SHARED:
        up = down = Tiles(rows, 64, 64, group=4, num_stages=2)
    elif pairs <= FEW_PAIRS:
        up = down = Tiles(rows, 32, 128, num_stages=4)
    elif rows <= 32:
        up, down = Tiles(rows, 64, 128), Tiles(rows, 128, 128)
    elif rows == 64:
        up, down = Tiles(64, 64, 64, num_stages=4), Tiles(64, 128, 64, num_stages=4)
    elif weight_size == itemsize:
        up = Tiles(128, 128, 64, group=16, num_warps=8, num_stages=4)
        down = Tiles(128, 256, 64, group=16, num_warps=8, num_stages=4)
    else:  # widening and scaling FP8 takes registers
        up = Tiles(128, 64, 128, group=16, num_warps=8)
        down = Tiles(128, 64, 64, group=16, num_warps=8, num_stages=4)
    return fitted(up, 2, itemsize, weight_size, shared), fitted(
        down, 1, itemsize, weight_size, shared
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
) -> None:
    """See `radix_kernels.fused_experts`, which has checked the arguments.

    Reads no tensor on the host, so a CUDA graph may capture it.
    """
    pairs = topk_ids.numel()
    if pairs == 0 or hidden_states.shape[1] == 0:
        out.zero_()
        return
    tiles = choose_tiles(
        pairs,
        w1.shape[0],
        hidden_states.element_size(),
        w1.element_size(),
        shared_memory(w1.device),
    )
    run(
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        w1_scale,
        w2_scale,
        expert_map,
        out,
        *tiles,
        use_fp8_w8a8,
    )


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
) -> None:
    """`fused_experts` by given tiles; both products have the same rows. Quantised activations are
    widened again."""
    from ..moe import moe_align_block_size

    tokens, topk = topk_ids.shape
    pairs, hidden, inter = tokens * topk, x.shape[1], w2.shape[2]
    named = w1.shape[0] if expert_map is None else expert_map.shape[0]
    widen = w1.element_size() == 1 and not multiplies(w1.device, w1.dtype)
    fnuz, fp8 = w1.dtype == torch.float8_e4m3fnuz, w1.dtype
    if widen:
        w1, w2 = w1.view(torch.uint8), w2.view(torch.uint8)
    few = pairs <= up.block_m and pairs <= FEW_PAIRS
    order: tuple[Any, Any, Any] = (None, None, None)
    blocks = pairs
    if not few:
        order = moe_align_block_size(topk_ids, named, up.block_m, expert_map=expert_map)
        blocks = order[1].shape[0]
    act = x.new_empty((pairs, inter))
    part = x.new_empty((pairs, hidden))

    def launch(
        source: torch.Tensor, w: torch.Tensor, scale: Any, to: torch.Tensor, k: int, tiles: Tiles
    ) -> None:
        n, gated = to.shape[1], to is act
        product[(blocks * -(-n // tiles.block_n),)](
            source, w, scale, topk_ids, expert_map, *order, to, pairs, source.stride(0), to.stride(0),
            K=k, N=n, NUM_EXPERTS=named, LOCALS=w1.shape[0], TOPK=topk if gated else 1, GATED=gated, FEW=few,
            MAPPED=expert_map is not None, SCALE=0 if scale is None else 1 if scale.ndim == 1 else 2,
            WIDEN=widen, FNUZ=fnuz, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
            GROUP=tiles.group, SWAP=tiles.swap, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    launch(_quantized(x, fp8) if use_fp8_w8a8 else x, w1, w1_scale, act, hidden, up)
    if use_fp8_w8a8:
        act = _quantized(act, fp8)
    launch(act, w2, w2_scale, part, inter, down)
    block = min(1024, 1 << (hidden - 1).bit_length())
    combine[(tokens, -(-hidden // block))](
        part, topk_weights, topk_ids, expert_map, out, out.stride(0), HIDDEN=hidden, NUM_EXPERTS=named,
        LOCALS=w1.shape[0], TOPK=topk, MAPPED=expert_map is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _quantized(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    return quantized_activations(x.float(), fp8).to(x.dtype)


@cache
def shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return HOPPER_SHARED  # Triton's interpreter
    if torch.version.hip:
        return CDNA_SHARED
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
