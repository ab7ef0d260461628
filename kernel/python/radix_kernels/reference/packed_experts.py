"""The experts' products over packed weights."""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

import torch

from ..gating import Activation


class Experts(Protocol):
    """What is read of `radix_kernels.PackedExperts`."""

    @property
    def w1(self) -> Sized: ...

    def gated_product(
        self, expert: int, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor: ...

    def down_product(
        self, expert: int, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor: ...


def fused_experts_packed(
    hidden_states: torch.Tensor,
    experts: Experts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    activation: Activation = "silu",
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `radix_kernels.fused_experts_packed`: one expert after the other, in the order of their
    numbers.

    The products are the experts' own (`linear`, or `linear_silu_and_mul`): only its kernel knows
    the layout of a packed weight. Reads topk_ids on the host.
    """
    x = hidden_states
    topk = topk_ids.shape[1]
    local = _local(topk_ids.reshape(-1).long(), expert_map, len(experts.w1))
    order = local.argsort(stable=True)
    values = x.new_zeros(local.shape[0], x.shape[1])
    begin = int((local < 0).sum())
    found, counts = local[order[begin:]].unique_consecutive(return_counts=True)
    for expert, count in zip(found.tolist(), counts.tolist(), strict=True):
        pairs = order[begin : begin + count]
        begin += count
        rows = x[pairs // topk]
        activated = experts.gated_product(expert, rows, _row(bias1, expert), activation)
        values[pairs] = experts.down_product(expert, activated, _row(bias2, expert))
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for column in range(topk):
        total += topk_weights[:, column, None] * values[column::topk]
    return total.to(x.dtype) if out is None else out.copy_(total)


def _row(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]


def _local(ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int) -> torch.Tensor:
    """The experts as the weights number them; -1: not here."""
    if expert_map is not None:
        count = expert_map.shape[0]
        named = (ids >= 0) & (ids < count)
        ids = torch.where(named, expert_map.long()[ids.clamp(0, max(count - 1, 0))], -1)
    return torch.where((ids >= 0) & (ids < experts), ids, -1)
