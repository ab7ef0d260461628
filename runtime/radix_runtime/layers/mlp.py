"""The gated MLP: down(act(gate(x)) * up(x))."""

import torch
from torch import nn

from .. import ops
from ..model_config import ModelConfig
from ..quantization.dense import DenseMethod
from .base import BuildContext
from .linear import ColumnParallelLinear, RowParallelLinear

# act(x[..., :I]) * x[..., I:] by the names of ModelConfig.hidden_act
gated_activations = {"silu": ops.silu_and_mul, "gelu": ops.gelu_and_mul, "gelu_tanh": ops.gelu_tanh_and_mul}


class GatedMLP(nn.Module):
    def __init__(self, ctx: BuildContext, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = ColumnParallelLinear(ctx, hidden, parts, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(ctx, inner, hidden, bias=config.mlp_bias)
        self._activation = gated_activations[config.hidden_act]
        # Where few rows meet a GPU this is one kernel, which rounds once.
        fusible = config.hidden_act == "silu" and not config.mlp_bias
        self._fused = fusible and isinstance(self.gate_up_proj.method, DenseMethod)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused:
            return self.down_proj(ops.linear_silu_and_mul(x, self.gate_up_proj.weight))
        return self.down_proj(self._activation(self.gate_up_proj(x)))
