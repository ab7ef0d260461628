"""Gated activations: [..., 2 I], gate and up -> [..., I]."""

from collections.abc import Callable

import torch

from .. import ops
from ..specs import Activation, ClampedSwiGlu

# act(x[..., :I]) * x[..., I:], by the names of specs.Mlp.activation.
gated_activations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ops.silu_and_mul,
    "gelu": ops.gelu_and_mul,
    "gelu_tanh": ops.gelu_tanh_and_mul,
}


def apply_activation(activation: Activation, x: torch.Tensor) -> torch.Tensor:
    """x [..., 2 I] -> [..., I]."""
    if isinstance(activation, ClampedSwiGlu):
        return _clamped_swiglu(activation, x)
    return gated_activations[activation](x)


def activation_of_experts(activation: Activation) -> ops.Activation:
    """The activation as the wheel's products of experts take it."""
    if isinstance(activation, ClampedSwiGlu):
        return ops.ClampedSwiGlu(alpha=activation.alpha, limit=activation.limit)
    return activation


def _clamped_swiglu(activation: ClampedSwiGlu, x: torch.Tensor) -> torch.Tensor:
    """Computed in float32, rounded once."""
    gate, up = x.float().chunk(2, -1)
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return (gate * (gate * activation.alpha).sigmoid() * (1 + up)).to(x.dtype)
