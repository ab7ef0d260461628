"""What the tests of packed weights of few bits share."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _loader
from tests.kernel.helpers import assert_same_bits

# Whether products have AMX tiles, or those that test_emulated_tiles.py emulates.
HAS_TILES = rk.capabilities().get("isa") == "amx" or "RADIX_TEST_TILES" in os.environ
CPU_LIBRARY_ONLY = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(
        _loader.backend != "cpu", reason="quantized weights belong to the CPU library"
    ),
]
# As for dense weights: float32 sums, one rounding. Integer sums add the roundings of two scales.
TOLERANCE = {
    torch.float32: (3e-6, 2e-5),
    torch.float16: (4e-4, 5.5e-4),
    torch.bfloat16: (3e-3, 4.2e-3),
}


def assert_rows_stand_alone(x: torch.Tensor, packed: rk.PackedWeight, **options: bool) -> None:
    """`linear` gives each of 70 rows or more its bits whatever the other rows and the threads."""
    rows = x.shape[0]
    whole = rk.linear(x, packed, **options)
    parts = ((0, 1), (3, 5), (10, 26), (30, 37), (37, 70), (70, rows), (0, rows))
    before = rk.get_num_threads()
    try:
        for threads, (begin, end) in itertools.product((before, 1, 3), parts):
            rk.set_num_threads(threads)
            assert_same_bits(rk.linear(x[begin:end], packed, **options), whole[begin:end])
    finally:
        rk.set_num_threads(before)
