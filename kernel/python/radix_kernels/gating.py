"""The gated activations that experts have, by name or by a record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiGlu:
    """`(up + 1) * gate * sigmoid(alpha * gate)` with gate at most `limit` and up within `-limit ..
    limit`; a NaN stays one. The defaults are gpt-oss's. ValueError where alpha is not finite or
    limit is not above 0."""

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.alpha):
            raise ValueError(f"ClampedSwiGlu: alpha is {self.alpha}, expected a finite number")
        if not self.limit > 0:
            raise ValueError(f"ClampedSwiGlu: limit is {self.limit}, expected a number above 0")


Activation = str | ClampedSwiGlu

# As the kernels number them: RK_ACTIVATION_* of activation.h.
SILU = 0
GELU = 1
GELU_TANH = 2
SWIGLU_CLAMPED = 3
_NUMBERS = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH}


class Gating(NamedTuple):
    """An activation as the kernels take it. alpha, limit: of SWIGLU_CLAMPED, else 0."""

    number: int
    alpha: float
    limit: float


PLAIN = Gating(number=SILU, alpha=0.0, limit=0.0)


def read_gating(op: str, activation: Activation) -> Gating:
    """The activation by its name, where `swiglu_clamped` stands for `ClampedSwiGlu()`, or by its
    record. ValueError for another."""
    if activation == "swiglu_clamped":
        activation = ClampedSwiGlu()
    if isinstance(activation, ClampedSwiGlu):
        return Gating(number=SWIGLU_CLAMPED, alpha=activation.alpha, limit=activation.limit)
    number = _NUMBERS.get(activation)
    if number is None:
        known = ", ".join((*_NUMBERS, "swiglu_clamped"))
        raise ValueError(
            f"{op}: activation is {activation!r}, expected one of {known}, or a ClampedSwiGlu"
        )
    return Gating(number=number, alpha=0.0, limit=0.0)
