"""Mixture of experts: routing, sorting by expert, and the experts' products.

Common to the routers (`topk_softmax`, `topk_sigmoid`, `moe_fused_gate`)
    logits          [T, E] bfloat16, float16 or float32, rows may be strided, the last dimension is
                    contiguous; E at most 1024
    result          (topk_weights float32 [T, topk], topk_ids int32 [T, topk]), the best expert
                    first, equal scores in the order of their ids; topk at most min(E, 32)
    out             that pair, contiguous, to write into
    NaN             a row with one has NaN weights; its ids are distinct and in range, NaN last
Scores are computed in float32 and compared there: two that differ in float64 may tie. A row
depends on no other row.
"""

from __future__ import annotations

from typing import Any

from . import _arrays, _checks, _choices, _dispatch, _loader
from ._arrays import Array, torch_views
from ._checks.moe import (
    MAX_EXPERTS,
    check_alignment,
    check_bias,
    check_biases,
    check_experts,
    check_groups,
    check_quantized,
    check_routing,
    check_shared,
    check_sum,
)
from ._lazy import reference
from .gating import SILU, Activation, read_gating

Routed = tuple[Array, Array]
_LEAST_NORMAL = 2.0**-126  # of float32


def topk_softmax(
    gating_output: Array,
    topk: int,
    *,
    renormalize: bool = False,
    num_expert_group: int = 1,
    topk_group: int = 1,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    out: Routed | None = None,
) -> Routed:
    """The largest logits of each token and their softmax.

    Weights are the softmax over all E experts at the chosen ones, with renormalize over the chosen
    ones alone (they then add up to 1), times routed_scaling_factor (not 0). With num_expert_group
    above 1 (at most 32) the experts are that many equal ranges of ids, a group's score is its
    largest logit, and only experts of the topk_group best groups (equal scores: the first) are
    chosen. Of the topk columns the last num_fused_shared_experts (0 to topk - 1) are experts that
    every token goes to: ids E, E + 1, ... with weight 1. See the module for logits, result and NaN.
    Tolerance to the float64 reference: norm 1e-6. Errors: TypeError (dtype), ValueError (shape,
    stride, topk, groups, shared experts), NotImplementedError (E above 1024).
    """
    op = "topk_softmax"
    _checks.require(
        op,
        abs(routed_scaling_factor) >= _LEAST_NORMAL,
        f"routed_scaling_factor is {routed_scaling_factor}, expected at least {_LEAST_NORMAL:.3g}",
    )
    weights, ids = _routed(op, gating_output, topk, out)
    run = _dispatch.native(op, gating_output)
    if run is not None:
        run(
            gating_output, renormalize, num_expert_group, topk_group, num_fused_shared_experts,
            routed_scaling_factor, weights, ids,
        )  # fmt: skip
        return weights, ids
    x, w, i = torch_views(gating_output, weights, ids)
    check_routing(op, "gating_output", x, w, i, num_fused_shared_experts)
    check_shared(op, num_fused_shared_experts, topk)
    chosen = topk - num_fused_shared_experts
    check_groups(op, "gating_output", x.shape[1], num_expert_group, topk_group, chosen)
    found = reference.topk_softmax(
        x,
        w.shape[1],
        renormalize=renormalize,
        num_expert_group=num_expert_group,
        topk_group=topk_group,
        num_fused_shared_experts=num_fused_shared_experts,
        routed_scaling_factor=routed_scaling_factor,
        compute_dtype=reference.float32(),
    )
    _copy(w, i, found)
    return weights, ids


def topk_sigmoid(
    gating_output: Array,
    topk: int,
    *,
    renormalize: bool = False,
    correction_bias: Array | None = None,
    num_fused_shared_experts: int = 0,
    out: Routed | None = None,
) -> Routed:
    """The best experts by `sigmoid(logit) + correction_bias`, and their sigmoids.

    correction_bias: float32 [E] decides who is chosen and is not in the weights; without it the
    logits decide. With renormalize a token's weights are divided by their sum (plus 1e-20).
    num_fused_shared_experts, tolerance and errors as `topk_softmax`. See the module for logits,
    result and NaN.
    """
    op = "topk_sigmoid"
    weights, ids = _routed(op, gating_output, topk, out)
    run = _dispatch.native(op, gating_output)
    if run is not None:
        run(gating_output, renormalize, correction_bias, num_fused_shared_experts, weights, ids)
        return weights, ids
    x, b, w, i = torch_views(gating_output, correction_bias, weights, ids)
    check_routing(op, "gating_output", x, w, i, num_fused_shared_experts)
    check_shared(op, num_fused_shared_experts, topk)
    if b is not None:
        check_bias(op, "correction_bias", b, x)
    found = reference.topk_sigmoid(
        x,
        w.shape[1],
        renormalize=renormalize,
        correction_bias=b,
        num_fused_shared_experts=num_fused_shared_experts,
        compute_dtype=reference.float32(),
    )
    _copy(w, i, found)
    return weights, ids


def moe_fused_gate(
    input: Array,
    bias: Array,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    *,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    out: Routed | None = None,
) -> Routed:
    """Biased grouped routing (DeepSeek-V3, 2024, arXiv:2412.19437, section 2.1.2).

    c = sigmoid(input) + bias. The experts are num_expert_group equal ranges of ids (at most 32); a
    group's score is the sum of its two largest c; the topk_group best groups stay (equal scores:
    the first), and the topk largest c in them are chosen. Weights: their sigmoids, divided by their
    sum (plus 1e-20), times routed_scaling_factor. Of the topk columns the last
    num_fused_shared_experts (0 to topk - 1) are experts that every token goes to: ids E, E + 1, ...
    with weight 1 (`fused_experts` takes them as further experts of w1 and w2). input: the logits;
    bias: float32 [E]. See the module for logits, result and NaN (a NaN counts least in its group).
    Tolerance and errors as `topk_softmax`.
    """
    op = "moe_fused_gate"
    weights, ids = _routed(op, input, topk, out)
    run = _dispatch.native(op, input)
    if run is not None:
        run(
            input, bias, num_expert_group, topk_group, routed_scaling_factor,
            num_fused_shared_experts, weights, ids,
        )  # fmt: skip
        return weights, ids
    x, b, w, i = torch_views(input, bias, weights, ids)
    check_routing(op, "input", x, w, i, num_fused_shared_experts)
    check_bias(op, "bias", b, x)
    check_shared(op, num_fused_shared_experts, topk)
    chosen = topk - num_fused_shared_experts
    check_groups(op, "input", x.shape[1], num_expert_group, topk_group, chosen)
    found = reference.moe_fused_gate(
        x,
        b,
        num_expert_group,
        topk_group,
        w.shape[1],
        num_fused_shared_experts=num_fused_shared_experts,
        routed_scaling_factor=routed_scaling_factor,
        compute_dtype=reference.float32(),
    )
    _copy(w, i, found)
    return weights, ids


def moe_align_block_size(
    topk_ids: Array, num_experts: int, block_size: int, *, expert_map: Array | None = None
) -> tuple[Array, Array, Array]:
    """Sort (token, place) pairs by expert, each expert's padded to whole blocks.

    topk_ids: int32 [T, topk], contiguous; ids outside of 0 .. num_experts - 1 (at most 1024) are
    left out. expert_map: int32 [num_experts], an expert's local number, -1: left out (expert
    parallelism). Returns, all int32: sorted_token_ids [P], indices into the flat topk_ids,
    ascending within an expert, T * topk where it pads; expert_ids [P / block_size], the (local)
    expert of each block; num_tokens_post_padded [1]. P is the most that these shapes may need; what
    lies past num_tokens_post_padded is unspecified. Errors: TypeError (dtype), ValueError (shape,
    stride, num_experts, block_size).
    """
    op = "moe_align_block_size"
    _checks.require(op, block_size >= 1, f"block_size is {block_size}, expected at least 1")
    _checks.require(
        op,
        1 <= num_experts <= MAX_EXPERTS,
        f"num_experts is {num_experts}, expected 1 to {MAX_EXPERTS}",
    )
    _checks.dtype(op, "topk_ids", topk_ids, ("int32",))
    _checks.rank(op, "topk_ids", topk_ids, 2)
    n = topk_ids.shape[0] * topk_ids.shape[1]
    blocks = (n + min(n, num_experts) * (block_size - 1)) // block_size
    run = _dispatch.native(op, topk_ids)
    if run is not None:
        sorted_ids = _arrays.empty(topk_ids, (blocks * block_size,))
        experts = _arrays.empty(topk_ids, (blocks,))
        total = _arrays.empty(topk_ids, (1,))
        run(topk_ids, num_experts, block_size, expert_map, sorted_ids, experts, total)
        return sorted_ids, experts, total
    ids, mapped = torch_views(topk_ids, expert_map)
    check_alignment(op, ids, num_experts, mapped)
    return reference.moe_align_block_size(ids, num_experts, block_size, expert_map=mapped)


def moe_sum(input: Array, *, out: Array | None = None) -> Array:
    """`out[t] = sum over k of input[t, k]`, in float32 and in the order of k, rounded once.

    input: [T, topk, H] bfloat16, float16 or float32, last dimension contiguous. out: [T, H] of
    input's dtype. Returns out. Tolerance to the float64 reference: norm 1e-5 (float32), 4.9e-4
    (float16), 3.95e-3 (bfloat16). Errors: TypeError (dtype), ValueError (shape, stride).
    """
    op = "moe_sum"
    _checks.rank(op, "input", input, 3)
    if out is None:
        out = _arrays.empty(input, (input.shape[0], input.shape[2]))
    run = _dispatch.native(op, input)
    if run is not None:
        run(input, out)
        return out
    x, target = torch_views(input, out)
    check_sum(op, x, target)
    reference.moe_sum(x, out=target, compute_dtype=reference.float32())
    return out


def fused_experts(
    hidden_states: Array,
    w1: Array,
    w2: Array,
    topk_weights: Array,
    topk_ids: Array,
    *,
    w1_scale: Array | None = None,
    w2_scale: Array | None = None,
    bias1: Array | None = None,
    bias2: Array | None = None,
    activation: Activation = "silu",
    expert_map: Array | None = None,
    use_fp8_w8a8: bool = False,
    out: Array | None = None,
) -> Array:
    """`out[t] = sum over k of topk_weights[t, k] * (W2[e] @ act(gate, up) + bias2[e])`, where e =
    topk_ids[t, k].

    gate and up are the first and second half of `W1[e] @ hidden_states[t] + bias1[e]`. activation:
    `silu`, `gelu` or `gelu_tanh`, act(gate) * up as `silu_and_mul` and its neighbours have it, or
    `swiglu_clamped`, `(up + 1) * gate * sigmoid(1.702 * gate)` with gate at most 7 and up within -7
    .. 7; a `ClampedSwiGlu` has other numbers than these. bias1 [E, 2 I], bias2 [E, H]: contiguous,
    of hidden_states' dtype or float32. hidden_states: [T, H] bfloat16, float16 or float32, last
    dimension contiguous. w1: [E, 2 I, H], w2: [E, H, I], contiguous, of hidden_states' dtype; or
    float8_e4m3fn (in Triton float8_e4m3fnuz too) with float32 scales: one per expert (w1_scale,
    w2_scale [E]) or per block of 128 x 128 (w1_scale [E, ceil(2 I / 128), ceil(H / 128)], w2_scale
    alike). topk_weights: float32 [T, topk]; topk_ids: int32 [T, topk], contiguous; a pair whose id
    is outside of the experts adds nothing. expert_map: int32 [num_experts], an expert's local
    number; -1, or what is none of w1's: another rank's (it adds nothing here). out: [T, H] of
    hidden_states' dtype; may not overlap hidden_states. Returns out.

    Sums, biases and activations are float32; the activation's result and each expert's are rounded
    to the dtype on the way. FP8 weights are widened exactly and meet the activations in
    hidden_states' dtype. use_fp8_w8a8: with block scales (H and I multiples of 128) the activations
    are quantised too, hidden_states and the rounded result of act, as `per_token_group_quant` does;
    on Hopper the products are of FP8 then, elsewhere of what the quantised numbers stand for. On a
    GPU: Triton or, on Hopper where it is faster, a native kernel, which has neither biases nor an
    activation other than silu; the tiles and so the last bits depend on T. Tolerance to float64:
    norm 8e-3 (bfloat16), 1e-3 (float16), 2e-6 (float32); to float64 of the quantised activations
    2e-2, and they themselves are 2 to 4 % (norm) off. Errors: TypeError (dtype), ValueError (shape,
    stride, activation).
    """
    op = "fused_experts"
    if out is None:
        out = _arrays.empty_like(hidden_states)
    x, a, b, weights, ids = torch_views(hidden_states, w1, w2, topk_weights, topk_ids)
    a_scale, b_scale, mapped, target = torch_views(w1_scale, w2_scale, expert_map, out)
    check_experts(op, x, a, b, weights, ids, a_scale, b_scale, mapped, target)
    b1, b2 = torch_views(bias1, bias2)
    check_biases(op, x, b1, b2, a.shape[0], b.shape[2])
    gating = read_gating(op, activation)
    is_plain = b1 is None and b2 is None and gating.number == SILU
    if use_fp8_w8a8:
        check_quantized(op, a, b, a_scale)
    tensors = (x, a, b, weights, ids, a_scale, b_scale, mapped, target)

    def call(run: _dispatch.Native, bound: bool) -> None:
        if not bound:
            run(*tensors, use_fp8_w8a8, moe_align_block_size, b1, b2, gating)
            return
        if not is_plain:
            raise NotImplementedError(f"{op}: biases and activations other than silu are Triton's")
        _refuse_where_triton_is_faster(op, ids, b.shape[0], a_scale is not None, use_fp8_w8a8)
        named_experts = a.shape[0] if mapped is None else mapped.shape[0]
        workspace = _experts_workspace(x, ids, named_experts, b)
        run(*tensors, workspace, use_fp8_w8a8)

    if not _dispatch.attempt(op, hidden_states, call):
        reference.fused_experts(
            x, a, b, weights, ids, w1_scale=a_scale, w2_scale=b_scale, bias1=b1, bias2=b2,
            activation=activation, expert_map=mapped, use_fp8_w8a8=use_fp8_w8a8, out=target,
            compute_dtype=reference.float32(),
        )  # fmt: skip
    return out


def _refuse_where_triton_is_faster(
    op: str, ids: Any, experts: int, fp8: bool, use_fp8_w8a8: bool
) -> None:
    """NotImplementedError where Triton is there and faster than the native kernel."""
    if use_fp8_w8a8 or not _dispatch.triton_installed():
        return
    if _choices.triton_experts_are_faster(ids.numel(), experts, fp8):
        raise NotImplementedError(f"{op}: Triton is faster")


def _experts_workspace(x: Any, ids: Any, named_experts: int, w2: Any) -> Any:
    assert _loader.bind is not None
    tokens, topk = ids.shape
    _, hidden, inter = w2.shape
    size = _loader.bind.fused_experts_workspace_size(tokens, topk, named_experts, hidden, inter)
    return _arrays.empty(x, (size,), "uint8")


def _routed(op: str, x: Array, topk: int, out: Routed | None) -> Routed:
    if out is not None:
        weights, ids = out
        _checks.require(
            op, weights.shape[-1] == topk, f"out has {weights.shape[-1]} columns, expected {topk}"
        )
        return weights, ids
    _checks.require(op, topk >= 1, f"topk is {topk}, expected at least 1")
    rows = _arrays.shape(x)[:1] or (0,)
    shape = (*rows, topk)
    return _arrays.empty(x, shape, "float32"), _arrays.empty(x, shape, "int32")


def _copy(weights: Any, ids: Any, found: tuple[Any, Any]) -> None:
    found_weights, found_ids = found
    weights.copy_(found_weights)
    ids.copy_(found_ids)
