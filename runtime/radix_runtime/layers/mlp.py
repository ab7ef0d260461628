"""The gated MLP."""

import torch

from ..model_config import ModelConfig
from .activation import gated_activations
from .base import BuildContext, Fusible
from .linear import ColumnParallelLinear, RowParallelLinear


class GatedMLP(Fusible):
    """down(act(gate(x)) * up(x)); gate and up are one product."""

    fusible = True

    def __init__(self, ctx: BuildContext, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(
            ctx,
            in_features=hidden,
            outputs={"gate_proj": inner, "up_proj": inner},
            bias=config.mlp_bias,
        )
        self.down_proj = RowParallelLinear(
            ctx, in_features=inner, out_features=hidden, bias=config.mlp_bias
        )
        self.activation = config.hidden_act

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + the MLP of x, both [T, hidden_size]; residual's memory may become the
        result."""
        projection = self.gate_up_proj
        if self.activation == "silu" and projection.bias is None:
            gated = projection.method.apply_silu_and_mul(projection, x)
        else:
            gated = gated_activations[self.activation](projection(x))
        return self.down_proj(gated, residual)
