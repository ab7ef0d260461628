"""A mixture of experts in a Decoder against the ops that its records name, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radix_kernels as rk
from radix_kernels import decoder as records
from tests.kernel.test_decoder import EPS, HIDDEN, Model, step
from tests.marks import needs_cpu_library

pytestmark = needs_cpu_library

EXPERTS = 12
TOPK = 3
WIDTH = 48
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"router": "softmax", "renormalize": False},
    "softmax renormalized": {"router": "softmax"},
    "softmax of groups": {
        "router": "softmax", "renormalize": False, "groups": 4, "top_groups": 2, "scaling": 1.7,
    },
    "sigmoid": {"router": "sigmoid"},
    "grouped": {"router": "grouped", "groups": 4, "top_groups": 2, "scaling": 1.7},
}  # fmt: skip


def routed(logits: torch.Tensor, settings: dict[str, Any], bias: torch.Tensor) -> Any:
    """The ops that the router's record names."""
    renormalize = settings.get("renormalize", True)
    if settings["router"] == "softmax":
        weights, ids = rk.topk_softmax(
            logits,
            TOPK,
            renormalize=renormalize,
            num_expert_group=settings.get("groups", 1),
            topk_group=settings.get("top_groups", 1),
        )
        return weights * settings.get("scaling", 1.0), ids
    if settings["router"] == "sigmoid":
        return rk.topk_sigmoid(logits, TOPK, renormalize=renormalize, correction_bias=bias)
    groups = (settings["groups"], settings["top_groups"], TOPK)
    return rk.moe_fused_gate(logits, bias, *groups, routed_scaling_factor=settings["scaling"])


@pytest.mark.parametrize("kind", ["dense", "fp8", "w8a8", "w4a8"])
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("has_terms", [False, True])
def test_a_mixture_of_experts(name: str, kind: str, has_terms: bool) -> None:
    """A norm of some columns alone, a router, experts, a shared expert that is added to theirs."""
    model = Model()
    tokens = 5
    settings = dict(ROUTERS[name])
    bias = torch.randn(EXPERTS, generator=model.gen) / 4
    if settings["router"] != "softmax":
        settings["bias"] = bias
    norm = model.random(HIDDEN // 2)
    gate = rk.pack_weight(model.random(EXPERTS, HIDDEN) * HIDDEN**-0.5)
    shared = rk.pack_weight(model.random(HIDDEN, HIDDEN) * HIDDEN**-0.5, kind=kind)
    experts = rk.pack_experts(
        model.random(EXPERTS, 2 * WIDTH, HIDDEN) * HIDDEN**-0.5,
        model.random(EXPERTS, HIDDEN, WIDTH) * WIDTH**-0.5,
        kind,
    )
    terms: dict[str, Any] = {}
    if has_terms:
        terms["bias1"] = model.random(EXPERTS, 2 * WIDTH)
        terms["bias2"] = model.random(EXPERTS, HIDDEN).float()
        terms["activation"] = rk.ClampedSwiGlu(alpha=1.5, limit=0.7)
    sizes = [HIDDEN, HIDDEN, EXPERTS, TOPK, TOPK, HIDDEN, HIDDEN]
    types = ["bfloat16", "bfloat16", "float32", "float32", "int32", "bfloat16", "bfloat16"]
    residual, x, logits, weights, ids, out, beside = (
        records.Columns(buffer=number, first=0, count=size) for number, size in enumerate(sizes)
    )
    half = records.Columns(buffer=0, first=HIDDEN // 2, count=HIDDEN // 2)
    decoder = rk.Decoder(
        list(zip(sizes, types, strict=True)),
        [
            records.NormOp(x=half, out=half, weight=norm, eps=EPS),
            records.NormOp(x=residual, out=x, weight=model.norm, eps=EPS),
            records.LinearOp(x=x, out=logits, weight=gate),
            records.RouteOp(logits=logits, weights=weights, ids=ids, **settings),
            records.ExpertsOp(x=x, weights=weights, ids=ids, out=out, experts=experts, **terms),
            records.LinearOp(x=x, out=beside, weight=shared),
            records.AddOp(out.buffer, beside.buffer),
            records.AddOp(residual.buffer, out.buffer),
        ],
    )
    hidden, places = step(model, [tokens], [tokens])
    expected = hidden.clone()
    expected[:, HIDDEN // 2 :] = rk.rmsnorm(expected[:, HIDDEN // 2 :], norm, EPS)
    normed_rows = rk.rmsnorm(expected, model.norm, EPS)
    chosen = routed(rk.linear(normed_rows, gate, out_dtype=torch.float32), settings, bias)
    mixed = rk.fused_experts_packed(normed_rows, experts, *chosen, **terms)
    expected = expected + (mixed + rk.linear(normed_rows, shared, keep_x=True))  # a prompt
    assert expected.isfinite().all()
    assert torch.equal(decoder(hidden, **places), expected)
