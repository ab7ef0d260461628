"""Rotary position embedding: the tables that the attention layers share."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from .. import ops
from ..errors import ConfigError
from ..specs import Rope
from .base import BuildContext


class RotaryTables:
    """The tables of a model: one for each RoPE that its layers have."""

    def __init__(self, ctx: BuildContext) -> None:
        self._ctx = ctx
        self._tables: list[tuple[Rope | None, torch.Tensor]] = []

    def get(self, rope: Rope | None) -> torch.Tensor:
        """See `rotary_table`; the same tensor for an equal `rope`."""
        for known, table in self._tables:
            if known == rope:
                return table
        table = rotary_table(self._ctx, rope)
        self._tables.append((rope, table))
        return table


def rotary_table(ctx: BuildContext, rope: Rope | None) -> torch.Tensor:
    """Cosines and sines of every position, float32 [max_positions, rotary_dim] on the model's
    device. None, a layer without positions: a table that turns nothing. Raises ConfigError on a
    setting of RoPE scaling that is not supported."""
    if rope is None:
        still = torch.tensor([1.0, 0.0], device=ctx.device)
        return still.repeat(ctx.max_positions, 1)
    if rope.scaling is not None and rope.scaling["rope_type"] == "longrope":
        return _longrope_table(rope, rope.scaling, ctx.max_positions).to(ctx.device)
    try:
        table = ops.rope_cos_sin_cache(
            rope.rotary_dim, ctx.max_positions, rope.theta, scaling=rope.scaling
        )
    except ValueError as error:
        raise ConfigError(f"config.json: {error}") from None
    return table.to(ctx.device)


def _longrope_table(rope: Rope, scaling: Mapping[str, Any], max_positions: int) -> torch.Tensor:
    """LongRoPE (Ding et al., 2024, arXiv:2402.13753): each frequency is divided by a factor of its
    own, of `short_factor` where every position lies in the original context, else of `long_factor`.
    Cached keys cannot change their frequencies when a sequence grows, so the context that is served
    chooses."""
    original = scaling["original_max_position_embeddings"]
    which = "short_factor" if max_positions <= original else "long_factor"
    divisors = torch.tensor(scaling.get(which) or [], dtype=torch.float64)
    if len(divisors) != rope.rotary_dim // 2:
        raise ConfigError(
            f"config.json: {which} has {len(divisors)} numbers, expected {rope.rotary_dim // 2}"
        )
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    frequencies = rope.theta**-exponents / divisors
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        factor = scaling["factor"]
        growth = math.log(factor) / math.log(original)
        magnitude = math.sqrt(1 + growth) if factor > 1 else 1.0
    return (torch.cat((angles.cos(), angles.sin()), -1) * magnitude).float()
