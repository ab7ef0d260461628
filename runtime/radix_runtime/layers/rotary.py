"""Rotary position embedding from one precomputed table."""

from __future__ import annotations

import torch

from .. import ops
from ..errors import ConfigError
from ..model_config import RopeConfig
from .base import BuildContext


class RotaryEmbedding:
    """The table, float32 [max_positions, rotary_dim], is shared by all layers of a model."""

    def __init__(self, ctx: BuildContext, rope: RopeConfig, head_dim: int) -> None:
        self._head_dim = head_dim
        try:
            table = ops.rope_cos_sin_cache(
                rope.rotary_dim, ctx.max_positions, rope.theta, scaling=rope.scaling
            )
        except ValueError as error:
            raise ConfigError(f"config.json: {error}") from None
        self._table = table.to(ctx.device)

    def apply(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
        """Rotates q [T, Hq, D] and k [T, Hkv, D] in place."""
        ops.apply_rope_inplace(positions, q, k, self._head_dim, self._table)
