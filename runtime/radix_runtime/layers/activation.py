"""Gated activations: act(x[..., :I]) * x[..., I:]."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import ops

_GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ops.silu_and_mul,
    "gelu": ops.gelu_and_mul,
    "gelu_tanh": ops.gelu_tanh_and_mul,
}


def gated_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """`name` as in ModelConfig.hidden_act; maps [T, 2 I] to [T, I]."""
    return _GATED[name]
