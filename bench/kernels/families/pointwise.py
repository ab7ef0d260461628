"""Norms, RoPE and gated activations at the widths of real models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import radix_kernels as rk

from ..harness import Case

TOKENS = {"cpu": (1, 32, 512), "cuda": (1, 64, 4096)}


def norm(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for hidden in (1024, 4096):
        weight = torch.randn(hidden, device=device, dtype=dtype)
        for tokens in TOKENS[device.type]:
            size = tokens * hidden * dtype.itemsize

            def one(tokens: int = tokens, hidden: int = hidden) -> tuple[torch.Tensor, ...]:
                return (torch.randn(tokens, hidden, device=device, dtype=dtype),)

            def two(tokens: int = tokens, hidden: int = hidden) -> tuple[torch.Tensor, ...]:
                shape = (tokens, hidden)
                return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(2))

            def torch_fused(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor = weight) -> None:
                r.add_(x)
                x.copy_(F.rms_norm(r, (r.shape[-1],), w, 1e-6))

            yield Case(
                "rmsnorm", f"{tokens}x{hidden}", dtype, 2 * size, 4 * tokens * hidden, one,
                {
                    "radix": lambda x, w=weight: rk.rmsnorm(x, w, 1e-6),
                    "torch": lambda x, w=weight: F.rms_norm(x, (x.shape[-1],), w, 1e-6),
                },
            )  # fmt: skip
            yield Case(
                "fused_add_rmsnorm", f"{tokens}x{hidden}", dtype, 4 * size, 5 * tokens * hidden,
                two,
                {
                    "radix": lambda x, r, w=weight: rk.fused_add_rmsnorm(x, r, w, 1e-6),
                    "torch": torch_fused,
                },
            )  # fmt: skip


def activation(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for inter in (3072, 14336):
        for tokens in TOKENS[device.type]:

            def make(tokens: int = tokens, inter: int = inter) -> tuple[torch.Tensor]:
                return (torch.randn(tokens, 2 * inter, device=device, dtype=dtype),)

            def eager(x: torch.Tensor) -> torch.Tensor:
                gate, up = x.chunk(2, dim=-1)
                return F.silu(gate) * up

            yield Case(
                "silu_and_mul", f"{tokens}x{inter}", dtype,
                3 * tokens * inter * dtype.itemsize, 5 * tokens * inter, make,
                {"radix": rk.silu_and_mul, "torch": eager},
            )  # fmt: skip


def rope(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    cache = rk.rope_cos_sin_cache(128, 8192, 1e6).to(device)
    cos, sin = cache.chunk(2, dim=-1)
    for hq, hkv in ((16, 8), (32, 8)):
        for tokens in TOKENS[device.type]:

            def make(t: int = tokens, hq: int = hq, hkv: int = hkv) -> tuple[torch.Tensor, ...]:
                positions = torch.randint(0, 8192, (t,), device=device)
                q, k = (torch.randn(t, h, 128, device=device, dtype=dtype) for h in (hq, hkv))
                return positions, q, k

            def ours(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
                rk.apply_rope_inplace(positions, q, k, 128, cache)

            def eager(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
                c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
                for x in (q, k):
                    a, b = x.float().chunk(2, dim=-1)
                    x.copy_(torch.cat((a * c - b * s, b * c + a * s), dim=-1))

            size = tokens * (hq + hkv) * 128
            yield Case(
                "apply_rope_inplace", f"{tokens}x({hq}+{hkv})x128", dtype,
                2 * size * dtype.itemsize, 3 * size, make, {"radix": ours, "torch": eager},
            )  # fmt: skip
