"""Thresholds between the implementations of one op, where the library does not choose by itself.

Every figure was measured on an H200; the page that a function names has the measurements. Choices
within a kernel (tiles, splits) stand with the kernel: the `choose_*` functions of `triton`, and the
library's own sources.
"""

from __future__ import annotations

# Up to so many rows of x Hopper's dense kernels are ahead of cuBLAS with nothing fused.
HOPPER_ROWS = 64

# Up to so many rows of x the product reads a quantized weight of Hopper's library as it is packed;
# of more, the weight is widened to x's dtype first (docs/kernels/quantized.md).
QUANTIZED_ROWS = 512

_MEBIBYTE = 1 << 20


def blas_is_ahead(rows: int, n: int, k: int) -> bool:
    """Whether cuBLAS is ahead of Hopper's dense kernels for 16-bit `x [rows, k] @ weight [n, k].T`
    with nothing fused (docs/kernels/gemm.md).

    Above HOPPER_ROWS it always is. From 33 rows on it is for weights of 4 to 96 MiB with at most
    8,192 rows and k below n; of 64 rows with k up to 2 n.
    """
    if rows > HOPPER_ROWS:
        return True
    if rows <= HOPPER_ROWS // 2:
        return False
    weight_bytes = 2 * n * k
    longest_k = 2 * n if rows == HOPPER_ROWS else n - 1
    return k <= longest_k and n <= 8192 and 4 * _MEBIBYTE <= weight_bytes < 96 * _MEBIBYTE


def blas_is_ahead_of_fused(rows: int, n: int, k: int, *, gated: bool) -> bool:
    """Whether cuBLAS, and the end apart, are ahead of Hopper's kernel for both of 16-bit `x [rows,
    k] @ weight [n, k].T` (docs/kernels/gemm.md). gated: the end is SiLU-and-mul, else a residual.

    Gated they are where a batch of 65 to 511 rows leaves anything of a last tile of 128 or 256
    empty, for weights of 12 MiB and more: measured when such a tile took longer than a full one,
    and not since. Products with a residual stay with the kernel whatever their rows: where cuBLAS
    shares k between blocks it rounds parts of a sum.
    """
    if not gated or not HOPPER_ROWS < rows < 512 or 2 * n * k < 12 * _MEBIBYTE:
        return False
    tile = 128 if rows <= 128 else 256
    return rows % tile != 0


def triton_experts_are_faster(pairs: int, experts: int, fp8: bool) -> bool:
    """Whether Triton's `fused_experts` is faster than Hopper's for that many (token, expert) pairs
    and local experts (docs/kernels/notes/moe.md: three models).

    fp8: the weights are FP8 and the activations are not.
    """
    if fp8:
        hopper_is_faster = 16 < pairs <= 64 or pairs >= 16 * experts
        return not hopper_is_faster
    return pairs < 128 * experts
