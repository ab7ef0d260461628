"""Routers: which experts a token passes, and how much each of them counts."""

from typing import Any

import torch

from .. import ops
from ..quantization.base import meta_parameter
from ..quantization.dense import DenseMethod
from ..specs import GroupedRouter, Moe, Router, SigmoidRouter, SoftmaxRouter
from .base import BuildContext
from .linear import ReplicatedLinear

Routed = tuple[torch.Tensor, torch.Tensor]


class SoftmaxGate(ReplicatedLinear):
    """See SoftmaxRouter. Its weight is never quantized: which experts run hangs on small
    differences."""

    special_ops = ("topk_softmax",)

    def __init__(
        self, ctx: BuildContext, hidden_size: int, num_experts: int, router: SoftmaxRouter
    ) -> None:
        super().__init__(
            ctx.with_method(DenseMethod()),
            in_features=hidden_size,
            out_features=num_experts,
            bias=router.bias,
        )
        self._router = router

    def route(self, x: torch.Tensor) -> Routed:
        """x [T, hidden_size] -> weights float32 [T, top_k] and ids int32 [T, top_k]."""
        router = self._router
        return ops.topk_softmax(self(x), router.top_k, renormalize=router.renormalize)


class _CorrectedGate(ReplicatedLinear):
    """Logits in float32, and the corrections of the choice; nothing of it is ever quantized."""

    def __init__(self, ctx: BuildContext, hidden_size: int, num_experts: int, router: Any) -> None:
        super().__init__(
            ctx.with_method(DenseMethod()), in_features=hidden_size, out_features=num_experts
        )
        self.e_score_correction_bias = meta_parameter(num_experts, dtype=torch.float32)
        self._router = router

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] -> logits float32 [T, num_experts]."""
        return self.method.apply(self, x, out_dtype=torch.float32)


class SigmoidGate(_CorrectedGate):
    """See SigmoidRouter."""

    special_ops = ("topk_sigmoid",)

    def route(self, x: torch.Tensor) -> Routed:
        """x [T, hidden_size] -> weights float32 [T, top_k] and ids int32 [T, top_k]."""
        return ops.topk_sigmoid(
            self(x),
            self._router.top_k,
            renormalize=True,
            correction_bias=self.e_score_correction_bias,
        )


class GroupedGate(_CorrectedGate):
    """See GroupedRouter."""

    special_ops = ("moe_fused_gate",)

    def route(self, x: torch.Tensor) -> Routed:
        """x [T, hidden_size] -> weights float32 [T, top_k] and ids int32 [T, top_k]."""
        router = self._router
        return ops.moe_fused_gate(
            self(x),
            self.e_score_correction_bias,
            router.num_groups,
            router.top_groups,
            router.top_k,
            routed_scaling_factor=router.scaling,
        )


# The block of each kind of router: (ctx, hidden_size, num_experts, router) -> module.
_GATES: dict[type[Router], Any] = {
    SoftmaxRouter: SoftmaxGate,
    SigmoidRouter: SigmoidGate,
    GroupedRouter: GroupedGate,
}


def build_gate(
    ctx: BuildContext, hidden_size: int, spec: Moe
) -> SoftmaxGate | SigmoidGate | GroupedGate:
    """The router that `spec` describes."""
    gate = _GATES[type(spec.router)]
    return gate(ctx, hidden_size, spec.num_experts, spec.router)
