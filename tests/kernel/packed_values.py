"""What a checkpoint's layer stands for once it is packed."""

from __future__ import annotations

import numpy as np
import torch

import radix_kernels as rk
from tests.kernel.helpers import assert_close, spread

TOLERANCE = {
    torch.float32: (3e-6, 2e-5),
    torch.float16: (4e-4, 5.5e-4),
    torch.bfloat16: (3e-3, 4.2e-3),
}


def values_of(arguments) -> torch.Tensor:
    """What `embedding` sees of the packed weight: each value, rounded to float32."""
    packed = rk.pack_weight(**arguments, dtype=torch.float32)
    return rk.embedding(torch.arange(packed.n), packed)


def check_packed(arguments, value: np.ndarray, rng: torch.Generator) -> None:
    """The packed weight is value [N, K], exactly, as float32 holds a 16-bit scale times a code;
    `linear` is close."""
    assert torch.equal(values_of(arguments).double(), torch.from_numpy(value))
    for dtype, tolerance in TOLERANCE.items():
        packed = rk.pack_weight(**arguments, dtype=dtype)
        assert packed.shape == value.shape
        for tokens in (1, 5, 40):
            x = spread((tokens, packed.k), dtype, rng)
            expected = x.double() @ torch.from_numpy(value).T
            assert_close(f"linear {packed.kind}", rk.linear(x, packed), expected, tolerance)
