"""A gated sum and scaled weights of a router as records of `Decoder`: the bits of the ops that they
name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radix_kernels as rk
from radix_kernels import decoder as records
from tests.kernel.latent_records import places
from tests.marks import needs_cpu_library

EPS = 1e-5

pytestmark = needs_cpu_library


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 37, 256])
def test_a_gated_sum(dtype: torch.dtype, size: int, rng: Any) -> None:
    """hidden += norm(hidden) * sigmoid(gate of it), in float32, rounded once."""
    name = str(dtype).removeprefix("torch.")
    norm = torch.randn(size, generator=rng).to(dtype)
    gate = rk.pack_weight(torch.randn(1, size, generator=rng).to(dtype))
    buffers = [(size, name), (size, name), (1, name), (1, "float32"), (1, "int32")]
    hidden, x, logits, weights, ids = (
        records.Columns(buffer=number, first=0, count=count)
        for number, (count, _) in enumerate(buffers)
    )
    program = [
        records.NormOp(x=hidden, out=x, weight=norm, eps=EPS),
        records.LinearOp(x=x, out=logits, weight=gate),
        records.RouteOp(
            logits=logits, weights=weights, ids=ids, router="sigmoid", renormalize=False
        ),
        records.AddOp(to=0, x=1, scale=weights),
    ]
    data = torch.randn(7, size, generator=rng).to(dtype)
    normed = rk.rmsnorm(data, norm, EPS)
    counts, _ = rk.topk_sigmoid(rk.linear(normed, gate), 1)
    assert torch.allclose(counts, rk.linear(normed, gate).float().sigmoid(), rtol=1e-5)
    expected = (data + normed * counts).to(dtype)
    assert torch.equal(rk.Decoder(buffers, program)(data, **places([7], [7], rng)), expected)


def test_weights_of_a_softmax_are_scaled(rng: Any) -> None:
    buffers = [(5, "float32"), (3, "float32"), (3, "int32")]
    logits, weights, ids = (
        records.Columns(buffer=number, first=0, count=count)
        for number, (count, _) in enumerate(buffers)
    )
    route = records.RouteOp(
        logits=logits, weights=weights, ids=ids, router="softmax", renormalize=False, scaling=2.5
    )
    last = records.Columns(buffer=1, first=2, count=1)
    data = torch.randn(4, 5, generator=rng)
    expected, _ = rk.topk_softmax(data, 3, routed_scaling_factor=2.5)
    expected = data + data * expected[:, 2:]
    program = [route, records.AddOp(to=0, x=0, scale=last)]
    assert torch.equal(rk.Decoder(buffers, program)(data, **places([4], [4], rng)), expected)


def test_a_scale_is_one_float32_column(rng: Any) -> None:
    for buffers, scale in (
        ([(8, "bfloat16")], records.Columns(buffer=0, first=0, count=1)),
        ([(8, "float32")], records.Columns(buffer=0, first=0, count=2)),
    ):
        decoder = rk.Decoder(buffers, [records.AddOp(to=0, x=0, scale=scale)])
        hidden = torch.zeros(1, 8, dtype=getattr(torch, buffers[0][1]))
        with pytest.raises((ValueError, TypeError), match="scale of an add"):
            decoder(hidden, **places([1], [1], rng))
