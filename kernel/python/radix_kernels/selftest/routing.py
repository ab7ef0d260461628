"""Routing to experts, the experts, and products of groups of rows."""

from __future__ import annotations

from typing import Any

import torch

from .bounds import EXACT, EXPERTS, GROUPED, ROUNDED_ONCE, SUM
from .trial import Trial, Wrong, case, reference, rk

_BLOCK = 128
# Of grouped products.
_EXPERTS = 3
_INPUTS = 128
_FEATURES = 192


@case
def topk_softmax(t: Trial) -> None:
    for tokens, experts, chosen in ((1, 8, 2), (13, 60, 4), (33, 256, 8)):
        x = t.randn(tokens, experts)
        got = rk.topk_softmax(t.there(x), chosen, renormalize=True)
        _check_routes(t, got, reference.topk_softmax(x.double(), chosen, renormalize=True))


@case
def topk_sigmoid(t: Trial) -> None:
    for tokens, experts, chosen in ((1, 8, 2), (13, 60, 4), (33, 256, 8)):
        x = t.randn(tokens, experts)
        bias = t.randn(experts, dtype=torch.float32)
        got = rk.topk_sigmoid(t.there(x), chosen, correction_bias=t.there(bias))
        exact = reference.topk_sigmoid(x.double(), chosen, correction_bias=bias.double())
        _check_routes(t, got, exact)


@case
def moe_fused_gate(t: Trial) -> None:
    for tokens, experts, groups in ((1, 64, 4), (19, 256, 8)):
        x = t.randn(tokens, experts)
        bias = t.randn(experts, dtype=torch.float32)
        got = rk.moe_fused_gate(t.there(x), t.there(bias), groups, 2, 6, routed_scaling_factor=2.5)
        exact = reference.moe_fused_gate(
            x.double(), bias.double(), groups, 2, 6, routed_scaling_factor=2.5
        )
        _check_routes(t, got, exact)


def _check_routes(t: Trial, got: Any, exact: Any) -> None:
    t.same(got[1], exact[1].int(), EXACT)
    t.near(got[0], exact[0], ROUNDED_ONCE["float32"])


@case
def moe_align_block_size(t: Trial) -> None:
    for tokens, experts, block in ((1, 4, 16), (37, 60, 64), (300, 8, 128)):
        ids = t.integers(-1, experts, tokens, 3)
        got = [x.cpu() for x in rk.moe_align_block_size(t.there(ids), experts, block)]
        expected = reference.moe_align_block_size(ids, experts, block)
        total = int(expected[2])
        t.same(got[2], expected[2], EXACT)
        t.same(got[0][:total], expected[0][:total], EXACT)
        t.same(got[1][: total // block], expected[1][: total // block], EXACT)


@case
def moe_sum(t: Trial) -> None:
    for tokens, chosen, width in ((1, 2, 64), (9, 8, 1000)):
        x = t.randn(tokens, chosen, width)
        out = t.poisoned(tokens, width)
        rk.moe_sum(t.there(x), out=out)
        t.near(out, reference.moe_sum(x.double()), SUM[t.name])


@case
def fused_experts(t: Trial) -> None:
    for tokens, experts in ((1, 4), (40, 8)):
        x, w1, w2, weights, ids = _experts(t, tokens, experts)
        out = t.poisoned(*x.shape)
        rk.fused_experts(*(t.there(part) for part in (x, w1, w2, weights, ids)), out=out)
        exact = reference.fused_experts(x.double(), w1.double(), w2.double(), weights, ids)
        t.near(out, exact, EXPERTS[t.name])


@case
def fused_experts_packed(t: Trial) -> None:
    for tokens, experts in ((1, 4), (40, 8)):
        x, w1, w2, weights, ids = _experts(t, tokens, experts)
        packed = rk.pack_experts(t.there(w1), t.there(w2))
        out = t.poisoned(*x.shape)
        rk.fused_experts_packed(t.there(x), packed, t.there(weights), t.there(ids), out=out)
        exact = reference.fused_experts(x.double(), w1.double(), w2.double(), weights, ids)
        t.near(out, exact, EXPERTS[t.name])


def _experts(t: Trial, tokens: int, experts: int) -> tuple[torch.Tensor, ...]:
    hidden = 128
    inner = 64
    x = t.randn(tokens, hidden)
    w1 = (t.randn(experts, 2 * inner, hidden) * hidden**-0.5).to(t.dtype)
    w2 = (t.randn(experts, hidden, inner) * inner**-0.5).to(t.dtype)
    return x, w1, w2, t.rand(tokens, 2), t.integers(-1, experts, tokens, 2)


@case
def m_grouped_gemm_contiguous(t: Trial) -> None:
    rows = 2 * _BLOCK
    x, weight, scales = _grouped(t, (rows, _INPUTS), (_EXPERTS, _FEATURES, _INPUTS))
    groups = torch.full((rows,), -1, dtype=torch.int32)
    groups[:100] = 2
    groups[_BLOCK : _BLOCK + 7] = 0
    out = t.poisoned(rows, _FEATURES, dtype=torch.bfloat16 if t.is_narrow else None)
    given = {name: t.there(s) for name, s in scales.items()}
    rk.m_grouped_gemm_contiguous(t.there(x), t.there(weight), t.there(groups), **given, out=out)
    exact = torch.zeros(rows, _FEATURES, dtype=torch.float64)
    reference.m_grouped_gemm_contiguous(_wide(x), _wide(weight), groups, **scales, out=exact)
    used = groups >= 0
    t.near(out.cpu()[used], exact[used], GROUPED["bfloat16" if t.is_narrow else t.name])
    _check_unwritten(out.cpu()[~used])


@case
def m_grouped_gemm_masked(t: Trial) -> None:
    rows = 40
    x, weight, scales = _grouped(t, (_EXPERTS, rows, _INPUTS), (_EXPERTS, _FEATURES, _INPUTS))
    counts = torch.tensor([40, 0, 9], dtype=torch.int32)
    out = t.poisoned(_EXPERTS, rows, _FEATURES, dtype=torch.bfloat16 if t.is_narrow else None)
    given = {name: t.there(s) for name, s in scales.items()}
    rk.m_grouped_gemm_masked(t.there(x), t.there(weight), t.there(counts), **given, out=out)
    exact = reference.m_grouped_gemm_masked(
        _wide(x),
        _wide(weight),
        counts,
        **scales,
        out=torch.zeros(_EXPERTS, rows, _FEATURES).double(),
    )
    used = torch.arange(rows) < counts[:, None]
    t.near(out.cpu()[used], exact[used], GROUPED["bfloat16" if t.is_narrow else t.name])
    _check_unwritten(out.cpu()[~used])


def _grouped(
    t: Trial, rows: tuple[int, ...], weights: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    x = t.randn(*rows).to(t.dtype)
    weight = t.randn(*weights).to(t.dtype)
    if not t.is_narrow:
        return x, weight, {}
    experts, features, inputs = weights
    blocks = (-(-features // _BLOCK), -(-inputs // _BLOCK))
    scales = {"x_scale": 0.5 + t.rand(*rows[:-1], blocks[1])}
    scales["weight_scale"] = 0.5 + t.rand(experts, *blocks)
    return x, weight, scales


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.element_size() > 1 else x


def _check_unwritten(rows: torch.Tensor) -> None:
    """Rows of no group stay as they were: poison."""
    if not bool(rows.isnan().all()):
        raise Wrong("rows of no group were written")
