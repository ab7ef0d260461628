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
        self._shared: Routed | None = None  # weights and ids of the shared experts, [1, num_shared]

    @property
    def top_k(self) -> int:
        """How many experts a token passes."""
        return int(self.router.top_k)

    def add_shared(self, count: int, device: torch.device) -> None:
        """From now on every token passes that many experts more."""
        first = self.shape.out_features
        ids = torch.arange(first, first + count, dtype=torch.int32, device=device)
        self._shared = (torch.ones(1, count, device=device), ids[None])
        self.num_shared = count

    def _with_shared(self, weights: torch.Tensor, ids: torch.Tensor) -> Routed:
        """What the routed experts have, and then the shared ones."""
        if self._shared is None:
            return weights, ids
        ones, numbers = self._shared
        tokens = len(ids)
        weights = torch.cat([weights, ones.expand(tokens, -1)], 1)
        return weights, torch.cat([ids, numbers.expand(tokens, -1)], 1)


class SoftmaxGate(_Gate):
    """See SoftmaxRouter. Its weight is never quantized: which experts run hangs on small
    differences."""

    special_ops = ("topk_softmax",)

    def route(self, x: torch.Tensor) -> Routed:
        """x [T, hidden_size] -> weights float32 and ids int32, [T, top_k + num_shared]."""
        router = self.router
        routed = ops.topk_softmax(self(x), router.top_k, renormalize=router.renormalize)
        return self._with_shared(*routed)


class _WideGate(_Gate):
    """Logits in float32; nothing of it is ever quantized."""

    def forward(self, x: Input) -> torch.Tensor:
        """x [T, in_features] -> logits float32 [T, num_experts]."""
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
        logits = self(x)
        if router.num_groups == 1 or logits.device.type == "cpu":
            weights, ids = ops.topk_softmax(
                logits,
                router.top_k,
                renormalize=False,
                num_expert_group=router.num_groups,
                topk_group=router.top_groups,
            )
        else:
            weights, ids = self._within_groups(logits.softmax(-1))
        if router.scaling != 1:
            weights.mul_(router.scaling)
        return self._with_shared(weights, ids)

    def _within_groups(self, scores: torch.Tensor) -> Routed:
        """Few small steps, where the wheel has no kernel."""
        router = self.router
        grouped = scores.unflatten(-1, (router.num_groups, -1))
        best = grouped.amax(-1).topk(router.top_groups, dim=-1).indices
        is_kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        kept = grouped.masked_fill(~is_kept[..., None], 0.0).flatten(-2)
        weights, ids = kept.topk(router.top_k, dim=-1)
        return weights, ids.int()


class SigmoidGate(_CorrectedGate):
    """See SigmoidRouter."""

    special_ops = ("topk_sigmoid",)

    def route(self, x: torch.Tensor) -> Routed:
        """x [T, hidden_size] -> weights float32 and ids int32, [T, top_k + num_shared]."""
        routed = ops.topk_sigmoid(
            self(x),
            self.router.top_k,
            renormalize=True,
            correction_bias=self.e_score_correction_bias,
        )
        return self._with_shared(*routed)


class GroupedGate(_CorrectedGate):
    """See GroupedRouter."""

    special_ops = ("moe_fused_gate",)

    def add_shared(self, count: int, device: torch.device) -> None:
        self.num_shared = count  # the op adds them itself

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
