"""A weight packed of several matrices has the bytes of their concatenation."""

from __future__ import annotations

import pytest
import torch

import radix_kernels as rk
from tests.kernel.packed_weights import CPU_LIBRARY_ONLY

pytestmark = CPU_LIBRARY_ONLY

KINDS = ("dense", "int8", "w8a8", "int4", "w4a8", "fp8")
# Outputs of the parts: whole blocks of 16, one of less at the end and at the beginning, one alone.
OUTPUTS = ((48, 16, 32), (64, 16, 5), (17, 16), (33,), (16, 1))


def assert_same(found: rk.PackedWeight, expected: rk.PackedWeight) -> None:
    for name in ("layout", "shape", "dtype", "kind", "group", "scale_dtype", "zeros", "mins"):
        assert getattr(found, name) == getattr(expected, name), name
    assert torch.equal(torch.as_tensor(found.data).cpu(), torch.as_tensor(expected.data).cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("outputs", OUTPUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes(kind, outputs, dtype, rng):
    for k in (1, 130, 256):
        w = torch.randn(sum(outputs), k, generator=rng).to(dtype)
        whole = torch.cat([w, w], dim=1)[:, :k]  # rows apart
        parts = list(whole.split(outputs))
        assert_same(rk.pack_merged(parts, kind), rk.pack_weight(w, kind=kind))
    x = torch.randn(3, k, generator=rng).to(dtype)
    merged = rk.pack_merged(parts, kind)
    assert torch.equal(rk.linear(x, merged), rk.linear(x, rk.pack_weight(w, kind=kind)))


@pytest.mark.parametrize("outputs", [32, 33])
def test_groups_and_numpy(outputs, rng):
    w = torch.randn(64, 200, generator=rng)
    merged = rk.pack_merged([w[:outputs].numpy(), w[outputs:].numpy()], "int4", group=32)
    assert_same(merged, rk.pack_weight(w.numpy(), kind="int4", group=32))
    assert_same(rk.pack_merged([w[:outputs], w[outputs:]]), rk.pack_weight(w))


@pytest.mark.parametrize("kind", KINDS)
def test_whole_blocks_are_not_copied_together(kind, rng, monkeypatch):
    w = torch.randn(64, 100, generator=rng)
    expected = rk.pack_weight(w, kind=kind)
    monkeypatch.setattr(torch, "cat", None)
    assert_same(rk.pack_merged(w.split([16, 32, 16]), kind), expected)
    with pytest.raises(TypeError, match="not callable"):
        rk.pack_merged(w.split([15, 49]), kind)


def test_errors(rng):
    w = torch.randn(32, 64, generator=rng)
    wrong = {
        "there are no parts": ([], "int8", None),
        "part 1 has 32 inputs, expected 64": ([w, w[:, :32]], "int8", None),
        "group is given": ([w, w], None, 64),
        "scales is None": ([w, w], "q4_k", None),
        "group is 7": ([w, w], "int8", 7),
    }
    for message, (parts, kind, group) in wrong.items():
        with pytest.raises(ValueError, match=message):
            rk.pack_merged(parts, kind, group=group)
    with pytest.raises(NotImplementedError, match="kind is 'int3'"):
        rk.pack_merged([w, w], "int3")
    with pytest.raises(TypeError, match="w has dtype int8"):
        rk.pack_merged([w.to(torch.int8)])
    with pytest.raises(TypeError, match="part 1 has dtype bfloat16, expected float32"):
        rk.pack_merged([w, w.bfloat16()])
    w[20, 5] = torch.nan
    with pytest.raises(ValueError, match="part 1: .* row 4 that is not finite"):
        rk.pack_merged([w[:16], w[16:]], "int8")
