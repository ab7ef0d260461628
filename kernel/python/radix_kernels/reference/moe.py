"""Mixture of experts."""

from __future__ import annotations

import torch

from ..gating import Activation
from ._out import finish
from .activation import gated
from .quantize import per_token_group_quant


def topk_softmax(
    gating_output: torch.Tensor,
    topk: int,
    *,
    renormalize: bool = False,
    num_expert_group: int = 1,
    topk_group: int = 1,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.topk_softmax`; the weights are of compute_dtype."""
    x = gating_output.to(compute_dtype)
    left_out = None
    if num_expert_group > 1:
        groups = x.unflatten(1, (num_expert_group, -1))
        scores = groups.gather(2, _best(groups, 1))[..., 0]
        left_out = _left_out(scores, topk_group, groups.shape[2])
    ids = _best(x, topk - num_fused_shared_experts, left_out)
    if renormalize:
        weights = x.gather(1, ids).softmax(1)
    else:
        weights = x.softmax(1).gather(1, ids)
    return _routed(x, weights * routed_scaling_factor, ids, num_fused_shared_experts)


def topk_sigmoid(
    gating_output: torch.Tensor,
    topk: int,
    *,
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    num_fused_shared_experts: int = 0,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.topk_sigmoid`; the weights are of compute_dtype."""
    x = gating_output.to(compute_dtype)
    choice = x if correction_bias is None else x.sigmoid() + correction_bias.to(compute_dtype)
    ids = _best(choice, topk - num_fused_shared_experts)
    weights = _sigmoid_weights(x, ids, renormalize=renormalize)
    return _routed(x, weights, ids, num_fused_shared_experts)


def moe_fused_gate(
    input: torch.Tensor,
    bias: torch.Tensor,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    *,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.moe_fused_gate`; the weights are of compute_dtype."""
    x = input.to(compute_dtype)
    choice = x.sigmoid() + bias.to(compute_dtype)
    groups = choice.unflatten(1, (num_expert_group, -1))
    group_size = groups.shape[2]
    scores = groups.gather(2, _best(groups, min(2, group_size))).sum(2)
    left_out = _left_out(scores, topk_group, group_size)
    best = _best(choice, topk - num_fused_shared_experts, left_out)
    weights = _sigmoid_weights(x, best, renormalize=True) * routed_scaling_factor
    return _routed(x, weights, best, num_fused_shared_experts)


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    *,
    expert_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `radix_kernels.moe_align_block_size`. Reads nothing on the host."""
    flat = topk_ids.flatten().long()
    n = flat.numel()
    device = topk_ids.device
    blocks = (n + min(n, num_experts) * (block_size - 1)) // block_size
    local = torch.arange(num_experts, device=device) if expert_map is None else expert_map.long()
    inside = (flat >= 0) & (flat < num_experts)
    # One expert more, behind the others, takes what is left out.
    expert = torch.where(inside, flat, num_experts)
    elsewhere = torch.cat([local, local.new_full((1,), -1)])[expert] < 0
    expert = torch.where(elsewhere, num_experts, expert)
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=device)
    counts.index_add_(0, expert, torch.ones_like(expert))
    padded = (counts[:-1] + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    # Room for what is left out behind the last place, cut off below.
    sorted_ids = torch.full((blocks * block_size + n,), n, dtype=torch.int32, device=device)
    order = expert.sort(stable=True).indices
    first = counts.cumsum(0) - counts
    begins = torch.cat([ends - padded, ends.new_tensor([blocks * block_size])])
    place = begins[expert[order]] + torch.arange(n, device=device) - first[expert[order]]
    sorted_ids[place] = order.to(torch.int32)
    starts = torch.arange(blocks, device=device) * block_size
    owner = torch.searchsorted(ends, starts, right=True).clamp(max=num_experts - 1)
    return (
        sorted_ids[: blocks * block_size],
        local[owner].to(torch.int32),
        ends[-1:].to(torch.int32),
    )


def moe_sum(
    input: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.moe_sum`."""
    return finish(input.to(compute_dtype).sum(1), out, input.dtype)


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    activation: Activation = "silu",
    expert_map: torch.Tensor | None = None,
    use_fp8_w8a8: bool = False,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.fused_experts`. Reads topk_ids on the host."""
    x = hidden_states.to(compute_dtype)
    if use_fp8_w8a8:
        x = quantized_activations(x, w1.dtype)
    result = torch.zeros_like(x)
    ids = topk_ids.long()
    named = torch.arange(w1.shape[0]) if expert_map is None else expert_map.cpu().long()
    for expert, local in enumerate(named.tolist()):
        token, place = (ids == expert).nonzero(as_tuple=True)
        if not 0 <= local < w1.shape[0] or not token.numel():
            continue
        both = _with_bias(x[token] @ _weight(w1, w1_scale, local, compute_dtype).T, bias1, local)
        gate, up = both.chunk(2, dim=1)
        act = gated(gate, up, activation)
        if use_fp8_w8a8:
            act = quantized_activations(act.to(hidden_states.dtype).to(compute_dtype), w1.dtype)
        value = _with_bias(act @ _weight(w2, w2_scale, local, compute_dtype).T, bias2, local)
        result.index_add_(0, token, value * topk_weights[token, place, None].to(compute_dtype))
    return finish(result, out, hidden_states.dtype)


def _with_bias(x: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    return x if bias is None else x + bias[expert].to(x.dtype)


def _weight(
    w: torch.Tensor, scale: torch.Tensor | None, expert: int, dtype: torch.dtype
) -> torch.Tensor:
    """An expert's matrix with its scale: one number, or one per block of 128 x 128."""
    one = w[expert].to(dtype)
    if scale is None:
        return one
    factor = scale[expert].to(dtype)
    if factor.ndim == 2:
        factor = factor.repeat_interleave(128, 0).repeat_interleave(128, 1)
        factor = factor[: one.shape[0], : one.shape[1]]
    return one * factor


def quantized_activations(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """What rows quantised to fp8 in groups of 128 columns stand for, in x's dtype."""
    codes, scales = per_token_group_quant(x, 128, dtype=fp8, compute_dtype=x.dtype)
    return (codes.to(x.dtype).unflatten(-1, (-1, 128)) * scales.to(x.dtype)[..., None]).flatten(-2)


def _best(score: torch.Tensor, count: int, left_out: torch.Tensor | None = None) -> torch.Tensor:
    """Ids of the largest along the last dimension: ties to the lowest id, NaN after -inf, those
    left out last."""
    # Three stable sorts: by number, then NaN to the end, then those left out behind them.
    number = score.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ids = number.sort(dim=-1, descending=True, stable=True).indices
    ids = _moved_last(ids, score.isnan())
    if left_out is not None:
        ids = _moved_last(ids, left_out)
    return ids[..., :count]


def _left_out(scores: torch.Tensor, kept: int, size: int) -> torch.Tensor:
    """By expert, whether it is in none of the groups of the best scores; groups of `size`."""
    stays = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, _best(scores, kept), True)
    return ~stays.repeat_interleave(size, dim=1)


def _moved_last(ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """ids in their order, but those of `last` (bool, by id) behind the others."""
    order = last.gather(-1, ids).to(torch.uint8).sort(dim=-1, stable=True).indices
    return ids.gather(-1, order)


def _sigmoid_weights(x: torch.Tensor, ids: torch.Tensor, *, renormalize: bool) -> torch.Tensor:
    weights = x.gather(1, ids).sigmoid()
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights


def _routed(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, shared: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """With the experts behind the others that every token goes to. A row with a NaN has NaN
    weights."""
    numbers = torch.arange(shared, dtype=ids.dtype, device=ids.device) + x.shape[1]
    ids = torch.cat([ids, numbers.expand(len(ids), -1)], 1)
    weights = torch.cat([weights, weights.new_ones(len(ids), shared)], 1)
    return weights.masked_fill(x.isnan().any(1, keepdim=True), torch.nan), ids.to(torch.int32)
