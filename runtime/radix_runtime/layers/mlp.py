"""The gated MLP: down(act(gate(x)) * up(x))."""

import torch
from torch import nn

from .. import ops
from ..model_config import ModelConfig
from .base import BuildContext
from .linear import ColumnParallelLinear, RowParallelLinear

# act(x[..., :I]) * x[..., I:] by the names of ModelConfig.hidden_act
gated_activations = {
    "silu": ops.silu_and_mul,
    "gelu": ops.gelu_and_mul,
    "gelu_tanh": ops.gelu_tanh_and_mul,
}


class GatedMLP(nn.Module):
    def __init__(self, ctx: BuildContext, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = ColumnParallelLinear(ctx, hidden, parts, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(ctx, inner, hidden, bias=config.mlp_bias)
        self._activation = gated_activations[config.hidden_act]
        self._fused = config.hidden_act == "silu" and not config.mlp_bias

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + the MLP of x."""
        both = self.gate_up_proj
        gated = (
            both.method.apply_silu_and_mul(both, x) if self._fused else self._activation(both(x))
        )
        return self.down_proj(gated, residual)
