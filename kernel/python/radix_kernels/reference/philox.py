"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) in exact torch int64 arithmetic."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four 32-bit words (int64 tensors, 0 .. 2**32 - 1) for a 4-word counter and 2-word key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products wrap in int64; their 64 bits are those of the unsigned products.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c1 = product1 & _MASK
        c3 = product0 & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(
    seed: torch.Tensor, position: torch.Tensor, vocab_size: int, stream: int = 0
) -> torch.Tensor:
    """float32 [B, vocab_size] in (0, 1 - 2**-24]: the noise of `top_k_top_p_sampling`.

    seed, position: int64 [B].
    """
    blocks = torch.arange((vocab_size + 3) // 4, device=seed.device)[None, :]
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    counter = (blocks, position[:, None] & _MASK, zero + stream, zero)
    key = (seed[:, None] & _MASK, (seed[:, None] >> 32) & _MASK)
    words = torch.stack(philox4x32(counter, key), -1).flatten(1)[:, :vocab_size]
    u = ((words.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32)
    return u.clamp(max=1 - 2.0**-24)
