"""What the tests of packed weights of few bits share."""

from __future__ import annotations

import pytest
import torch

from radix_kernels import _loader

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
