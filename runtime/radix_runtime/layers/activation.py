"""Gated activations act(x[..., :I]) * x[..., I:] by the names of ModelConfig.hidden_act."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import ops

gated_activations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ops.silu_and_mul,
    "gelu": ops.gelu_and_mul,
    "gelu_tanh": ops.gelu_tanh_and_mul,
}
