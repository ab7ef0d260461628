"""Routers: which experts a token passes, and how much each of them counts."""

from typing import Any

import torch

from .. import ops
from ..quantization.base import Input
from ..quantization.config import LayerKind
from ..quantization.params import Outputs, ParamSpec
from ..specs import (
    GroupedRouter,
    GroupedSoftmaxRouter,
    Moe,
    Router,
    SigmoidRouter,
    SoftmaxRouter,
)
from .base import BuildContext
from .linear import ReplicatedLinear

Routed = tuple[torch.Tensor, torch.Tensor]


class _Gate(ReplicatedLinear):
    """What all have: the spec, and how many experts a token passes. `num_shared`: experts behind
    the routed ones that every token passes with weight 1; their places are the last ones."""

    router: Any

    def __init__(self, ctx: BuildContext, hidden_size: int, num_experts: int, router: Any) -> None:
        super().__init__(
            ctx,
            in_features=hidden_size,
            out_features=num_experts,
            bias=getattr(router, "bias", False),
            kind=LayerKind.ROUTER,
        )
        self.router = router
        self.num_shared = 0

    @property
    def top_k(self) -> int:
        """How many experts a token passes."""
        return int(self.router.top_k)

    def add_shared(self, count: int) -> None:
        """From now on every token passes that many experts more."""
        self.num_shared = count


class SoftmaxGate(_Gate):
    """See SoftmaxRouter. Its weight is never quantized: which experts run hangs on small
    differences."""

    special_ops = ("topk_softmax",)

    def route(self, x: torch.Tensor) -> Routed:
        """x [T, hidden_size] -> weights float32 and ids int32, [T, top_k + num_shared]."""
        return ops.topk_softmax(
            self(x),
            self.router.top_k + self.num_shared,
            renormalize=self.router.renormalize,
            num_fused_shared_experts=self.num_shared,
        )


class _WideGate(_Gate):
    """Logits in float32; nothing of it is ever quantized."""

    def forward(self, x: Input) -> torch.Tensor:
        """x [T, in_features] -> logits float32 [T, num_experts]."""
        assert isinstance(x, torch.Tensor)  # a router takes no codes
        return self.method.apply(self, x, out_dtype=torch.float32)


class _CorrectedGate(_WideGate):
    """With the corrections of the choice."""

    e_score_correction_bias: torch.Tensor

    def __init__(self, ctx: BuildContext, hidden_size: int, num_experts: int, router: Any) -> None:
        super().__init__(ctx, hidden_size, num_experts, router)
        corrections = ParamSpec(
            name="e_score_correction_bias", dims=(Outputs(),), dtype=torch.float32
        )
        self.declare(corrections)


class GroupedSoftmaxGate(_WideGate):
    """See GroupedSoftmaxRouter."""

    special_ops = ("topk_softmax",)

    def route(self, x: torch.Tensor) -> Routed:
        """x [T, hidden_size] -> weights float32 and ids int32, [T, top_k + num_shared]."""
        router = self.router
        return ops.topk_softmax(
            self(x),
            router.top_k + self.num_shared,
            num_expert_group=router.num_groups,
            topk_group=router.top_groups,
            num_fused_shared_experts=self.num_shared,
            routed_scaling_factor=router.scaling,
        )


class SigmoidGate(_CorrectedGate):
    """See SigmoidRouter."""

    special_ops = ("topk_sigmoid",)

    def route(self, x: torch.Tensor) -> Routed:
        """x [T, hidden_size] -> weights float32 and ids int32, [T, top_k + num_shared]."""
        return ops.topk_sigmoid(
            self(x),
            self.router.top_k + self.num_shared,
            renormalize=True,
            correction_bias=self.e_score_correction_bias,
            num_fused_shared_experts=self.num_shared,
        )


class GroupedGate(_CorrectedGate):
    """See GroupedRouter."""

    special_ops = ("moe_fused_gate",)

    def route(self, x: torch.Tensor) -> Routed:
        """x [T, hidden_size] -> weights float32 and ids int32, [T, top_k + num_shared]."""
        router = self.router
        return ops.moe_fused_gate(
            self(x),
            self.e_score_correction_bias,
            router.num_groups,
            router.top_groups,
            router.top_k + self.num_shared,
            num_fused_shared_experts=self.num_shared,
            routed_scaling_factor=router.scaling,
        )


# The block of each kind of router: (ctx, hidden_size, num_experts, router) -> module.
_GATES: dict[type[Router], Any] = {
    SoftmaxRouter: SoftmaxGate,
    SigmoidRouter: SigmoidGate,
    GroupedRouter: GroupedGate,
    GroupedSoftmaxRouter: GroupedSoftmaxGate,
}


def build_gate(
    ctx: BuildContext, hidden_size: int, spec: Moe
) -> SoftmaxGate | SigmoidGate | GroupedGate | GroupedSoftmaxGate:
    """The router that `spec` describes."""
    gate = _GATES[type(spec.router)]
    return gate(ctx, hidden_size, spec.num_experts, spec.router)
