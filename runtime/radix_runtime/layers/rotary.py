"""Rotary position embedding: the table that the attention layers share."""

import torch

from .. import ops
from ..errors import ConfigError
from ..model_config import RopeConfig
from .base import BuildContext


def rotary_table(ctx: BuildContext, rope: RopeConfig) -> torch.Tensor:
    """Cosines and sines of every position, float32 [max_positions, rotary_dim] on the model's
    device. Raises ConfigError on a setting of RoPE scaling that is not supported."""
    try:
        table = ops.rope_cos_sin_cache(
            rope.rotary_dim, ctx.max_positions, rope.theta, scaling=rope.scaling
        )
    except ValueError as error:
        raise ConfigError(f"config.json: {error}") from None
    return table.to(ctx.device)
