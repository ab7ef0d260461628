"""Products of heads, each by a weight of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import radix_kernels as rk
from radix_kernels import _loader
from tests.kernel.helpers import (
    FLOATS,
    ROUNDED_ONCE,
    assert_close,
    assert_same_bits,
    guarded,
    spread,
)

pytestmark = pytest.mark.cpu_only

TOLERANCE = ROUNDED_ONCE | {torch.float32: (3e-6, 2e-5)}
# (tokens, heads, outputs, inputs): no token, one, odd sizes, more heads than an op has tensors,
# more rows than a block.
SHAPES = [
    (0, 2, 16, 8),
    (1, 1, 1, 1),
    (1, 16, 512, 128),
    (5, 3, 37, 23),
    (2, 65, 48, 80),
    (90, 2, 40, 96),
]


def pack(weights: torch.Tensor, kind: str | None = None) -> rk.PackedHeads:
    """[H, N, K]."""
    packed = (rk.pack_weight(weight.contiguous(), kind=kind) for weight in weights)
    return rk.PackedHeads(tuple(packed))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> None:
    tokens, heads, outputs, inputs = shape
    x = spread((tokens, heads, inputs), dtype, rng)
    weights = spread((heads, outputs, inputs), dtype, rng)
    exact = torch.einsum("thk,hnk->thn", x.double(), weights.double())
    got = rk.linear_heads(x, pack(weights))
    assert got.dtype == dtype
    assert_close("linear_heads", got, exact, TOLERANCE[dtype])
    reference = rk.reference.linear_heads(x, weights)
    assert_close("reference.linear_heads", reference, exact, ROUNDED_ONCE[dtype])


@pytest.mark.parametrize("kind", [None, "int8", "w8a8", "int4", "fp8"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_bits_are_those_of_heads_alone(
    kind: str | None, out_dtype: torch.dtype, tokens: int, rng: torch.Generator
) -> None:
    """Parts of heads in wider rows, into parts of heads: nothing else is written."""
    if _loader.backend != "cpu":
        pytest.skip("no native CPU library")
    wide = spread((tokens, 5, 192), torch.bfloat16, rng)
    x = wide[..., 64:]
    heads = pack(spread((5, 48, 128), torch.bfloat16, rng), kind)
    assert heads.native is not None
    assert heads.shape == (5, 48, 128)
    assert heads.nbytes == sum(weight.nbytes for weight in heads.weights)
    out = guarded((tokens, 5, 48), out_dtype, gap=3)
    assert rk.linear_heads(x, heads, out=out.view) is out.view
    out.check()
    for head, weight in enumerate(heads.weights):
        expected = rk.linear(x[:, head].contiguous(), weight, out_dtype=out_dtype)
        assert_same_bits(out.view[:, head].contiguous(), expected)


def test_the_library_takes_all_heads_at_once(rng: torch.Generator) -> None:
    """A decoder points at the library's list of heads, which a head that came later would move."""
    if _loader.backend != "cpu":
        pytest.skip("no native CPU library")
    heads = pack(spread((3, 20, 36), torch.float32, rng))
    assert not hasattr(heads.native, "add")
    pairs = [(weight.descriptor, weight.data) for weight in heads.weights]
    native = type(heads.native)(pairs)
    pairs.clear()
    x = spread((4, 3, 36), torch.float32, rng)
    out = guarded((4, 3, 20), torch.float32, gap=1)
    native.run(x, out.view)
    out.check()
    assert_same_bits(out.view.contiguous(), rk.linear_heads(x, heads))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """One product after the other, with the same results."""
    weights = spread((3, 20, 36), torch.float32, rng)
    x = spread((4, 3, 36), torch.float32, rng)
    heads = pack(weights)
    expected = rk.linear_heads(x, heads)
    monkeypatch.setattr(_loader, "bind", None)
    plain = rk.PackedHeads(heads.weights)
    monkeypatch.undo()
    assert plain.native is None
    out = guarded((4, 3, 20), torch.float32, gap=1)
    rk.linear_heads(x, plain, out=out.view)
    out.check()
    assert_same_bits(out.view.contiguous(), expected)
    with pytest.raises(ValueError, match=r"linear_heads: x has shape \[4, 3, 35\]"):
        rk.linear_heads(x[..., :35], plain)
    with pytest.raises(ValueError, match=r"linear_heads: out has shape \[4, 2, 20\]"):
        rk.linear_heads(x, plain, out=torch.empty(4, 2, 20))
    with pytest.raises(ValueError, match="linear_heads: x has 2 dimensions, expected 3"):
        rk.linear_heads(x[0], plain)


def test_numpy_arrays(rng: torch.Generator) -> None:
    weights = spread((3, 20, 36), torch.float32, rng)
    x = spread((4, 3, 36), torch.float32, rng)
    heads = rk.PackedHeads(tuple(rk.pack_weight(weight.numpy()) for weight in weights))
    got = rk.linear_heads(x.numpy(), heads)
    assert isinstance(got, np.ndarray)
    assert np.array_equal(got, rk.linear_heads(x, pack(weights)).numpy())


def test_refusals(rng: torch.Generator) -> None:
    if _loader.backend != "cpu":
        pytest.skip("no native CPU library")
    with pytest.raises(ValueError, match="PackedHeads: there are no weights"):
        rk.PackedHeads(())
    sizes = [rk.pack_weight(torch.zeros(shape)) for shape in ((4, 8), (4, 9))]
    with pytest.raises(ValueError, match="PackedHeads: weights are of several sizes"):
        rk.PackedHeads(tuple(sizes))
    mixed = rk.PackedHeads((sizes[0], rk.pack_weight(torch.zeros(4, 8).half())))
    heads = pack(torch.zeros(2, 4, 8))
    x = torch.zeros(3, 2, 8)
    half = torch.zeros(3, 2, 4).half()
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    for given, chosen, out, error, message in (
        (x[0, 0, 0], heads, None, ValueError, "linear_heads: x has 0 dimensions, expected 3"),
        (x[0], heads, None, ValueError, "linear_heads: x has 2 dimensions, expected 3"),
        (x[:, :1], heads, None, ValueError, r"linear_heads: x has shape \[3, 1, 8\]"),
        (x[..., :7], heads, None, ValueError, r"linear_heads: x has shape \[3, 2, 7\]"),
        (strided, heads, None, ValueError, r"linear_heads: x has strides \[16, 1, 2\]"),
        (x.bfloat16(), heads, None, TypeError, "x has dtype bfloat16, expected float32"),
        (x.int(), heads, None, TypeError, "linear_heads: x has dtype int32"),
        (x, mixed, None, TypeError, "x has dtype float32, expected float16"),
        (x, heads, torch.zeros(3, 2, 5), ValueError, r"linear_heads: out has shape \[3, 2, 5\]"),
        (x, heads, half, TypeError, "out has dtype float16, expected float32"),
    ):
        with pytest.raises(error, match=message):
            rk.linear_heads(given, chosen, out=out)
