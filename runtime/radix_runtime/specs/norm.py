"""Norms of the hidden state."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight. `unit_offset`: the checkpoint holds weight - 1."""

    eps: float
    unit_offset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight, plus a bias where there is one."""

    eps: float
    bias: bool = False


Norm = RmsNorm | LayerNorm
