"""Argument checks of the MoE ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _checks

MAX_EXPERTS = 1024
MAX_TOPK = 32
MAX_GROUPS = 32
SCALE_BLOCK = 128


def check_routing(op: str, name: str, x: Any, weights: Any, ids: Any, shared: int = 0) -> None:
    """Logits and the pair of results of a router, for the reference; `shared` of the columns are no
    choice among the experts."""
    _checks.dtype(op, name, x, _checks.FLOATS)
    _checks.rank(op, name, x, 2)
    _checks.contiguous_last(op, name, x)
    experts = x.shape[1]
    topk = weights.shape[1]
    if not 1 <= experts <= MAX_EXPERTS:
        raise NotImplementedError(
            f"{op}: {name} has {experts} experts, supported are 1 to {MAX_EXPERTS}"
        )
    most = min(experts + max(shared, 0), MAX_TOPK)
    _checks.require(
        op, 1 <= topk <= most, f"topk_weights has {topk} columns (topk), expected 1 to {most}"
    )
    _checks.dtype(op, "topk_weights", weights, ("float32",))
    _checks.dtype(op, "topk_ids", ids, ("int32",))
    for what, t in (("topk_weights", weights), ("topk_ids", ids)):
        _checks.shape(op, what, t, (x.shape[0], topk), "tokens and topk")
        _checks.require(op, t.is_contiguous(), f"{what} is not contiguous")


def check_shared(op: str, shared: int, topk: int) -> None:
    """How many of the columns are of experts that every token goes to, for the reference."""
    _checks.require(
        op,
        0 <= shared < topk,
        f"num_fused_shared_experts is {shared}, expected 0 to {topk - 1} (topk - 1)",
    )


def check_bias(op: str, name: str, bias: Any, x: Any) -> None:
    """The bias of a router's experts, for the reference."""
    _checks.dtype(op, name, bias, ("float32",))
    _checks.shape(op, name, bias, x.shape[1:], "experts")


def check_groups(op: str, name: str, experts: int, groups: int, kept: int, chosen: int) -> None:
    """That `chosen` experts can be found in `kept` of the groups, for the reference; name: the
    logits."""
    _checks.require(
        op,
        1 <= groups <= MAX_GROUPS and experts % groups == 0,
        f"{name} has {experts} experts in num_expert_group = {groups} groups, "
        f"expected 1 to {MAX_GROUPS} equal groups",
    )
    _checks.require(
        op, 1 <= kept <= groups, f"topk_group is {kept}, expected 1 to {groups} (num_expert_group)"
    )
    left = experts // groups * kept
    _checks.require(
        op,
        chosen <= left,
        f"{chosen} experts are to be chosen, but the {kept} groups that stay have {left} experts",
    )


def check_alignment(op: str, topk_ids: Any, num_experts: int, expert_map: Any) -> None:
    """What `moe_align_block_size` has not checked before it sized its results."""
    _checks.require(op, topk_ids.is_contiguous(), "topk_ids is not contiguous")
    if expert_map is not None:
        _checks.dtype(op, "expert_map", expert_map, ("int32",))
        _checks.shape(op, "expert_map", expert_map, (num_experts,), "num_experts")


def check_sum(op: str, x: Any, out: Any) -> None:
    """The tensors of `moe_sum`, for the reference."""
    _checks.dtype(op, "input", x, _checks.FLOATS)
    _checks.contiguous_last(op, "input", x)
    _checks.shape(op, "out", out, (x.shape[0], x.shape[2]), "tokens and hidden size of input")
    _checks.same_dtype(op, "out", out, "input", x)


def check_experts(
    op: str,
    x: Any,
    w1: Any,
    w2: Any,
    weights: Any,
    ids: Any,
    s1: Any,
    s2: Any,
    expert_map: Any,
    out: Any,
) -> None:
    """The tensors of `fused_experts`, whatever runs it: its outputs and workspace are allocated by
    their shapes."""
    _checks.dtype(op, "hidden_states", x, _checks.FLOATS)
    _checks.rank(op, "hidden_states", x, 2)
    _checks.contiguous_last(op, "hidden_states", x)
    _checks.rank(op, "w1", w1, 3)
    _checks.rank(op, "w2", w2, 3)
    tokens, hidden = x.shape
    experts = w1.shape[0]
    inter = w2.shape[2]
    _checks.shape(
        op,
        "w1",
        w1,
        (experts, 2 * inter, hidden),
        "experts, twice w2's last dimension, hidden size",
    )
    _checks.shape(op, "w2", w2, (experts, hidden, inter), "experts of w1, hidden size")
    _check_weights(op, x, w1, w2, s1, s2)
    _checks.dtype(op, "topk_weights", weights, ("float32",))
    _checks.rank(op, "topk_weights", weights, 2)
    _checks.dtype(op, "topk_ids", ids, ("int32",))
    _checks.shape(
        op, "topk_weights", weights, (tokens, weights.shape[1]), "tokens of hidden_states"
    )
    _checks.shape(op, "topk_ids", ids, weights.shape, "as topk_weights")
    if expert_map is not None:
        _checks.dtype(op, "expert_map", expert_map, ("int32",))
        _checks.rank(op, "expert_map", expert_map, 1)
    for name, t in (("w1", w1), ("w2", w2), ("topk_weights", weights), ("topk_ids", ids)):
        _checks.require(op, t.is_contiguous(), f"{name} is not contiguous")
    _checks.shape(op, "out", out, x.shape, "as hidden_states")
    _checks.same_dtype(op, "out", out, "hidden_states", x)
    _checks.contiguous_last(op, "out", out)


def check_biases(op: str, x: Any, bias1: Any, bias2: Any, experts: int, inter: int) -> None:
    """The biases of `fused_experts` and `fused_experts_packed` of that width, or None for none."""
    for name, bias, columns in (("bias1", bias1, 2 * inter), ("bias2", bias2, x.shape[1])):
        if bias is None:
            continue
        _checks.dtype(op, name, bias, ("float32", str(x.dtype).rpartition(".")[2]))
        _checks.shape(op, name, bias, (experts, columns), "experts, outputs")
        _checks.require(op, bias.is_contiguous(), f"{name} is not contiguous")


def check_expert_shapes(
    op: str, first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]
) -> None:
    """ValueError unless each expert's w1 [2 I, H] goes with its w2 [H, I]."""
    count = len(second)
    _checks.require(op, len(first) == count, f"w1 has {len(first)} experts, expected {count} (w2)")
    for expert, (shape, (hidden, inter)) in enumerate(zip(first, second, strict=True)):
        expected = (2 * inter, hidden)
        _checks.require(
            op, shape == expected, f"w1[{expert}] has shape {shape}, expected {expected} (w2's)"
        )


def check_packed_experts(
    op: str, x: Any, weights: Any, ids: Any, expert_map: Any, out: Any
) -> None:
    """The tensors of `fused_experts_packed`, whatever runs it."""
    _checks.rank(op, "hidden_states", x, 2)
    _checks.dtype(op, "topk_weights", weights, ("float32",))
    _checks.rank(op, "topk_weights", weights, 2)
    _checks.dtype(op, "topk_ids", ids, ("int32",))
    expected = (x.shape[0], weights.shape[1])
    _checks.shape(op, "topk_weights", weights, expected, "tokens of hidden_states")
    _checks.shape(op, "topk_ids", ids, weights.shape, "as topk_weights")
    if out is not None:
        _checks.shape(op, "out", out, x.shape, "as hidden_states")
        _checks.same_dtype(op, "out", out, "hidden_states", x)
    if expert_map is not None:
        _checks.dtype(op, "expert_map", expert_map, ("int32",))


def check_quantized(op: str, w1: Any, w2: Any, scale: Any) -> None:
    """What use_fp8_w8a8 asks for, after check_experts, whatever runs it."""
    _checks.require(
        op,
        scale is not None and scale.ndim == 3,
        "use_fp8_w8a8 needs weights with a scale for a block",
    )
    for name, w in (("w1", w1), ("w2", w2)):
        _checks.require(
            op,
            w.shape[2] % SCALE_BLOCK == 0,
            f"{name} has {w.shape[2]} columns, use_fp8_w8a8 needs multiples of 128",
        )


def _check_weights(op: str, x: Any, w1: Any, w2: Any, s1: Any, s2: Any) -> None:
    _checks.same_dtype(op, "w2", w2, "w1", w1)
    if w1.dtype == x.dtype:
        _checks.require(op, s1 is None and s2 is None, "w1_scale and w2_scale go with FP8 weights")
        return
    _checks.dtype(op, "w1", w1, (*_checks.FP8, str(x.dtype).rpartition(".")[2]))
    _checks.require(op, s1 is not None and s2 is not None, "FP8 weights need w1_scale and w2_scale")
    _checks.require(op, s1.ndim == s2.ndim, "w1_scale and w2_scale are of two kinds")
    for name, scale, w in (("w1_scale", s1, w1), ("w2_scale", s2, w2)):
        _checks.dtype(op, name, scale, ("float32",))
        experts, rows, columns = w.shape
        expected: tuple[int, ...] = (experts,)
        if scale.ndim != 1:
            expected = (experts, -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
        _checks.shape(op, name, scale, expected, "one an expert, or one a block of 128 x 128")
        _checks.require(op, scale.is_contiguous(), f"{name} is not contiguous")
