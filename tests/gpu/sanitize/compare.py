"""A result on the GPU beside the definition's on the CPU."""

from __future__ import annotations

from typing import Any

import torch

FP8 = torch.float8_e4m3fn
HALF = torch.bfloat16


def on_gpu(x: Any) -> Any:
    """A tensor's copy on the GPU; anything else as it is."""
    return x.cuda() if isinstance(x, torch.Tensor) else x


def compare(name: str, got: torch.Tensor, expected: torch.Tensor, allowed: float) -> None:
    """Ends the program unless the relative error (2-norm) is within `allowed`."""
    error = float((got.double().cpu() - expected.double()).norm() / expected.double().norm())
    print(f"{name}: error {error:.2e}", flush=True)
    if not error <= allowed:
        raise SystemExit(f"{name}: error {error:.3g}, allowed {allowed:g}")
