"""The thresholds between implementations, at their borders as the pages give them."""

from __future__ import annotations

import pytest

from radix_kernels._choices import (
    HOPPER_ROWS,
    blas_is_ahead,
    blas_is_ahead_of_fused,
    triton_experts_are_faster,
)

# Weights [n, k] of 16 bits: 4 MiB and 96 MiB are 2**21 and 48 * 2**20 elements.
SMALLEST = (2048, 1024)
LARGEST = (8192, 6143)


@pytest.mark.parametrize(
    ("rows", "shape", "ahead"),
    [
        (HOPPER_ROWS + 1, (8, 8), True),
        (32, SMALLEST, False),
        (33, SMALLEST, True),
        (64, SMALLEST, True),
        (33, (2048, 1023), False),
        (33, LARGEST, True),
        (33, (8192, 6144), False),
        (33, (8193, 1024), False),
        (63, (2048, 2047), True),
        (63, (2048, 2048), False),
        (64, (2048, 4096), True),
        (64, (2048, 4097), False),
    ],
)
def test_where_blas_is_ahead(rows, shape, ahead):
    n, k = shape
    assert blas_is_ahead(rows, n, k) == ahead


@pytest.mark.parametrize(
    ("rows", "ahead"),
    [
        (HOPPER_ROWS, False),
        (HOPPER_ROWS + 1, True),
        (127, True),
        (128, False),
        (129, True),
        (255, True),
        (256, False),
        (257, True),
        (511, True),
        (512, False),
        (513, False),
    ],
)
def test_where_blas_is_ahead_of_gated_products(rows, ahead):
    assert blas_is_ahead_of_fused(rows, 6144, 1024, gated=True) == ahead
    assert not blas_is_ahead_of_fused(rows, 6144, 1023, gated=True)  # less than 12 MiB
    assert not blas_is_ahead_of_fused(rows, 6144, 1024, gated=False)


@pytest.mark.parametrize(
    ("pairs", "fp8", "faster"),
    [
        (16, True, True),
        (17, True, False),
        (64, True, False),
        (65, True, True),
        (16 * 128 - 1, True, True),
        (16 * 128, True, False),
        (1, False, True),
        (128 * 128 - 1, False, True),
        (128 * 128, False, False),
    ],
)
def test_where_triton_is_faster_for_experts(pairs, fp8, faster):
    assert triton_experts_are_faster(pairs, 128, fp8) == faster
