"""The gated MLP."""

import torch

from ..quantization.base import Input
from ..specs import Mlp
from .activation import apply_activation
from .base import BuildContext, Fusible
from .linear import ColumnParallelLinear, RowParallelLinear


class GatedMLP(Fusible):
    """down(act(gate(x)) * up(x)); gate and up are one product. `reduce`: False leaves the sum over
    the ranks to the caller."""

    fusible = True

    def __init__(
        self, ctx: BuildContext, hidden_size: int, spec: Mlp, *, reduce: bool = True
    ) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(
            ctx.at("gate_up_proj"),
            in_features=hidden_size,
            outputs={"gate_proj": spec.width, "up_proj": spec.width},
            bias=spec.bias,
        )
        self.down_proj = RowParallelLinear(
            ctx.at("down_proj"),
            in_features=spec.width,
            out_features=hidden_size,
            bias=spec.bias,
            reduce=reduce,
        )
        self.activation = spec.activation

    def forward(
        self, x: Input, residual: torch.Tensor | None = None, *, reduce: bool = True
    ) -> torch.Tensor:
        """residual + the MLP of x, both [T, hidden_size]; residual's memory may become the result.
        `reduce`: False leaves the sum over the ranks to the caller."""
        down_product = self.down_proj if reduce else self.down_proj.part
        return down_product(self._gated(x), residual)

    def _gated(self, x: Input) -> Input:
        projection = self.gate_up_proj
        if self.activation != "silu":
            return apply_activation(self.activation, projection(x))
        if self.down_proj.fusible and self.down_proj.method.quantizes_x:
            return self.down_proj.method.gated(projection(x))
        is_plain = projection.bias is None and projection.fusible
        if is_plain and isinstance(x, torch.Tensor):
            return projection.method.apply_silu_and_mul(projection, x)
        return apply_activation(self.activation, projection(x))
