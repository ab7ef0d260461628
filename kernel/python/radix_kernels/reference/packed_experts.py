"""The experts' products over packed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..packed_experts import PackedExperts


def fused_experts_packed(
    hidden_states: torch.Tensor,
    experts: PackedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `radix_kernels.fused_experts_packed`: one expert after the other, in the order of their
    numbers.

    Products are those of `linear` and `linear_silu_and_mul`, for a packed weight's layout is its
    kernel's own. Reads topk_ids on the host.
    """
    from ..gemm import linear_silu_and_mul
    from ..linear import linear

    x, topk = hidden_states, topk_ids.shape[1]
    local = _local(topk_ids.reshape(-1).long(), expert_map, len(experts.w1))
    order = local.argsort(stable=True)
    values = x.new_zeros(local.shape[0], x.shape[1])
    begin = int((local < 0).sum())
    found, counts = local[order[begin:]].unique_consecutive(return_counts=True)
    for expert, count in zip(found.tolist(), counts.tolist(), strict=True):
        pairs = order[begin : begin + count]
        begin += count
        act = linear_silu_and_mul(x[pairs // topk], experts.w1[expert])
        values[pairs] = linear(act, experts.w2[expert])
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for column in range(topk):
        total += topk_weights[:, column, None] * values[column::topk]
    return total.to(x.dtype) if out is None else out.copy_(total)


def _local(ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int) -> torch.Tensor:
    """The experts as the weights number them; -1: not here."""
    if expert_map is not None:
        named = (ids >= 0) & (ids < expert_map.shape[0])
        ids = torch.where(
            named, expert_map.long()[ids.clamp(0, max(expert_map.shape[0] - 1, 0))], -1
        )
    return torch.where((ids >= 0) & (ids < experts), ids, -1)
