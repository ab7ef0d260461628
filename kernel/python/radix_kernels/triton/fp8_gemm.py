"""FP8 products with scales in Triton: tile choice and launch."""

from __future__ import annotations

import torch

from .float8_formats import multiplies
from .fp8_gemm_kernel import scaled_product
from .moe import HOPPER_SHARED, Tiles, fitted, shared_memory


def fp8_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """See `radix_kernels.fp8_scaled_mm`, which has checked the arguments."""
    steps = (scale_step(scales_a, mat_a.shape[0]), 0, scale_step(scales_b, mat_b.shape[1]), 0)
    run(mat_a, mat_b, scales_a, scales_b, bias, out, steps, blocks=False)


def fp8_blockwise_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `radix_kernels.fp8_blockwise_scaled_mm`, which has checked the arguments."""
    steps = (*scales_a.stride(), *reversed(scales_b.stride()))
    run(mat_a, mat_b, scales_a, scales_b, None, out, steps, blocks=True)


def bmm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `radix_kernels.bmm_fp8`, which has checked the arguments."""
    run(a, b, a_scale, b_scale, None, out, (0, 0, 0, 0), blocks=False)


def choose_tiles(rows: int, widen: bool, shared: int = HOPPER_SHARED) -> Tiles:
    """Few rows: narrow tiles, so that more programs read the weight. Widened operands take twice
    the room."""
    block_m = next((m for m in (16, 32, 64) if rows <= m), 128)
    many = block_m == 128
    tiles = Tiles(
        block_m=block_m,
        block_n=128 if many else 64,
        block_k=64 if widen else 128,
        group=8,
        num_warps=8 if many else 4,
        num_stages=4,
    )
    return fitted(tiles, matrices=1, itemsize=1, weight_size=1, shared=shared)


def run(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    steps: tuple[int, ...],
    *,
    blocks: bool,
    widen: bool | None = None,
) -> None:
    """a [(batch,) M, K] by b [(batch,) K, N].

    steps: of the scales, as the kernel takes them. widen: operands become float16; None: as the
    chip needs it.
    """
    if out.numel() == 0:
        return
    if widen is None:
        widen = not multiplies(a.device, a.dtype)
    fnuz = a.dtype == torch.float8_e4m3fnuz
    if widen:
        a = a.view(torch.uint8)
        b = b.view(torch.uint8)
    rows, k = a.shape[-2:]
    n = b.shape[-1]
    tiles = choose_tiles(rows, widen, shared_memory(a.device))
    batched = a.ndim == 3
    batch = a.shape[0] if batched else 1
    matrix_strides = (a.stride(0), b.stride(0), out.stride(0)) if batched else (0, 0, 0)
    row_tiles = -(-rows // tiles.block_m)
    column_tiles = -(-n // tiles.block_n)
    scaled_product[(batch * row_tiles * column_tiles,)](
        a, b, a_scale, b_scale, bias, out,
        rows, *matrix_strides, a.stride(-2), b.stride(-1), out.stride(-2), *steps,
        N=n, K=k, BATCHED=batched, BLOCKS=blocks, BIAS=bias is not None, WIDEN=widen, FNUZ=fnuz,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP=tiles.group,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def scale_step(scales: torch.Tensor, count: int) -> int:
    """From one of `count` scales to the next; 0: there is one for all."""
    if scales.numel() == 1:
        return 0
    return next(scales.stride(i) for i in range(scales.ndim) if scales.shape[i] == count)
