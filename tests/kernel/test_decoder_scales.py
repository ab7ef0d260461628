"""The records of Decoder that multiply: sums with a factor, columns by a number of each
position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radix_kernels as rk
from radix_kernels import decoder as records
from tests.marks import needs_cpu_library

pytestmark = needs_cpu_library
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = [1, 7, 400]
SIZES = [1, 5, 96, 1003]
POSITIONS = 50


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def columns(buffer: int, first: int, count: int) -> records.Columns:
    return records.Columns(buffer=buffer, first=first, count=count)


def places(positions: torch.Tensor) -> dict[str, Any]:
    """A step of one row without pages, whose tokens have these positions."""
    tokens = len(positions)
    return {
        "positions": positions,
        "slot_mapping": torch.zeros(tokens, dtype=torch.int64),
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
        "kv_lens": torch.tensor([tokens], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, tokens], dtype=torch.int32),
    }


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0.22, -3.0, 0.0, 1.0])
def test_a_sum_with_a_factor(factor: float, dtype: torch.dtype, tokens: int, size: int) -> None:
    """x is a norm of the first columns, so that buffer 1 holds other numbers than buffer 0."""
    hidden = random(tokens, size, seed=size).to(dtype)
    weight = random(size, seed=3).to(dtype)
    every = columns(0, 0, size)
    decoder = rk.Decoder(
        [(size, name_of(dtype)), (size, name_of(dtype))],
        [
            records.NormOp(x=every, out=columns(1, 0, size), weight=weight, eps=1e-5),
            records.AddOp(to=0, x=1, factor=factor),
        ],
    )
    x = rk.rmsnorm(hidden, weight, 1e-5)
    rounded = torch.tensor(factor, dtype=torch.float32)
    expected = (hidden.float() + x.float() * rounded).to(dtype)
    found = decoder(hidden.clone(), **places(torch.zeros(tokens, dtype=torch.int32)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_columns_by_position(
    index: torch.dtype, dtype: torch.dtype, tokens: int, size: int
) -> None:
    """Neighbouring columns keep their values."""
    hidden = random(tokens, size + 5, seed=size).to(dtype)
    factors = random(POSITIONS, seed=9)
    positions = (torch.arange(tokens) * 7 % POSITIONS).to(index)
    scale = records.ScaleOp(x=columns(0, 3, size), factors=factors)
    decoder = rk.Decoder([(size + 5, name_of(dtype))], [scale])
    expected = hidden.clone()
    part = hidden[:, 3 : 3 + size].float() * factors[positions.long(), None]
    expected[:, 3 : 3 + size] = part.to(dtype)
    assert torch.equal(decoder(hidden.clone(), **places(positions)), expected)


def test_no_tokens() -> None:
    scale = records.ScaleOp(x=columns(0, 0, 8), factors=torch.ones(4))
    decoder = rk.Decoder([(8, "float32")], [scale, records.AddOp(to=0, x=0, factor=2.0)])
    found = decoder(torch.empty(0, 8), **places(torch.empty(0, dtype=torch.int32)))
    assert found.shape == (0, 8)


@pytest.mark.parametrize("position", [-1, POSITIONS])
def test_a_position_beyond_the_factors(position: int) -> None:
    scale = records.ScaleOp(x=columns(0, 0, 8), factors=torch.ones(POSITIONS))
    decoder = rk.Decoder([(8, "float32")], [scale])
    positions = torch.tensor([0, position], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"positions\[1\] is {position}, expected 0 to 49"):
        decoder(torch.ones(2, 8), **places(positions))


@pytest.mark.parametrize(
    ("factors", "error", "message"),
    [
        (torch.ones(4, dtype=torch.float64), TypeError, "factors of a scale has dtype"),
        (torch.ones(4, 1), ValueError, r"factors of a scale has shape \[4, 1\]"),
        (torch.ones(8)[::2], ValueError, "factors of a scale"),
    ],
)
def test_factors_that_cannot_be(
    factors: torch.Tensor, error: type[Exception], message: str
) -> None:
    decoder = rk.Decoder([(8, "float32")], [records.ScaleOp(x=columns(0, 0, 8), factors=factors)])
    with pytest.raises(error, match=message):
        decoder(torch.ones(2, 8), **places(torch.zeros(2, dtype=torch.int32)))


def test_a_factor_beside_a_scale() -> None:
    add = records.AddOp(to=0, x=1, scale=columns(2, 0, 1), factor=2.0)
    decoder = rk.Decoder([(8, "float32"), (8, "float32"), (1, "float32")], [add])
    with pytest.raises(ValueError, match="factor of an add is 2, expected 1 beside a scale"):
        decoder(torch.ones(2, 8), **places(torch.zeros(2, dtype=torch.int32)))
