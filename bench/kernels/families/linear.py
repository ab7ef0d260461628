"""Dense products of real models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import radix_kernels as rk

from ..harness import Case

TOKENS = {"cpu": (1, 32, 512), "cuda": (1, 64, 4096)}


def linear(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for n, k in ((4096, 1024), (1024, 3072), (6144, 1024), (1024, 2048)):
        for m in TOKENS[device.type]:

            def make(m: int = m, n: int = n, k: int = k) -> tuple[object, ...]:
                weight = torch.randn(n, k, device=device, dtype=dtype) / k**0.5
                x = torch.randn(m, k, device=device, dtype=dtype)
                return x, weight, rk.pack_weight(weight)

            yield Case(
                "linear", f"{m}x{n}x{k}", dtype, (n * k + m * (n + k)) * dtype.itemsize,
                2 * m * n * k, make,
                {
                    "radix": lambda x, w, p: rk.linear(x, p),
                    "torch": lambda x, w, p: F.linear(x, w),
                },
            )  # fmt: skip
