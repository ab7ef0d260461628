"""Rotary embedding: tables, layouts and positions against float64."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import radix_kernels as rk
from tests.kernel.helpers import (
    DEFINITION,
    FLOATS,
    ROUNDED_ONCE,
    assert_close,
    assert_same_bits,
    distant,
    guarded,
    spread,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS = {
    "default": None,
    "default, named": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3, short": {**LLAMA3, "original_max_position_embeddings": 256, "factor": 32.0},
    "yarn": YARN,
    "yarn, attention factor": {**YARN, "attention_factor": 0.707, "beta_fast": 48, "beta_slow": 2},
    "yarn, mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, not truncated": {**YARN, "factor": 32.0, "truncate": False},
}


def transformers_tables(scaling, base: float, dim: int, positions: torch.Tensor):
    """cos and sin [T, dim] as transformers builds them, from its own frequencies."""
    kind = (scaling or {}).get("rope_type", "default")
    parameters = {"rope_type": kind, **(scaling or {}), "rope_theta": base}
    config = LlamaConfig(
        head_dim=dim,
        hidden_size=4 * dim,
        num_attention_heads=4,
        rope_parameters=parameters,
        max_position_embeddings=131072,
    )
    if kind == "default":
        frequencies = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        factor = 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, None)
    angles = positions[:, None].double() * frequencies.double()
    both = torch.cat((angles, angles), -1)
    return both.cos() * factor, both.sin() * factor


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize(("base", "dim"), [(10000.0, 64), (500000.0, 128), (1e6, 16)])
def test_table_equals_transformers(scaling, base, dim):
    limit = 2048
    cache = rk.rope_cos_sin_cache(dim, limit, base, scaling=scaling)
    assert cache.shape == (limit, dim) and cache.dtype == torch.float32
    cos, sin = transformers_tables(scaling, base, dim, torch.arange(limit))
    expected = torch.cat((cos[:, : dim // 2], sin[:, : dim // 2]), -1)
    # Their frequencies are float32: 2**-24 relative, times the position, is their own error.
    assert (cache.double() - expected).abs().max() < limit * 4e-7


def test_legacy_type_key_and_none():
    a = rk.rope_cos_sin_cache(32, 9, 1e4, scaling={"type": "linear", "factor": 2})
    b = rk.rope_cos_sin_cache(32, 9, 1e4, scaling={"rope_type": "linear", "factor": 2.0})
    assert_same_bits(a, b)
    assert rk.rope_cos_sin_cache(32, 0, 1e4).shape == (0, 32)


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        ({"rope_type": "longrope"}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        ({"rope_type": "linear", "factor": 2.0, "alpha": 1}, "alpha"),
    ],
)
def test_scaling_errors(scaling, text):
    with pytest.raises(ValueError, match=text):
        rk.rope_cos_sin_cache(32, 16, 1e4, scaling=scaling)
    with pytest.raises(ValueError, match="rotary_dim"):
        rk.rope_cos_sin_cache(31, 16, 1e4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 13])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("head_size", "rotary"), [(64, 64), (128, 128), (80, 80), (64, 16), (96, 24)]
)
@pytest.mark.parametrize("gap", [0, 8])
def test_neox_equals_transformers(dtype, tokens, index, head_size, rotary, gap, rng):
    cache = rk.rope_cos_sin_cache(rotary, 512, 1e4, scaling={**YARN, "factor": 8.0})
    positions = torch.randint(0, 512, (tokens,), generator=rng).to(index)
    q = spread((tokens, 4 * head_size), dtype, rng, gap=gap)
    k = spread((tokens, 2, head_size), dtype, rng, gap=gap)
    half = cache[positions.long()].double()
    cos, sin = (torch.cat((x, x), -1) for x in half.chunk(2, -1))
    expected = []
    for x in (q.unflatten(1, (4, head_size)), k):
        wide = x.double()
        turned, _ = apply_rotary_pos_emb(
            wide[..., :rotary], wide[..., :rotary], cos, sin, unsqueeze_dim=1
        )
        expected.append(torch.cat((turned, wide[..., rotary:]), -1))
        exact = wide.clone()
        rk.reference.apply_rope_inplace(positions, exact, None, head_size, cache)
        assert_close("reference.apply_rope_inplace", exact, expected[-1], DEFINITION)
    rk.apply_rope_inplace(positions, q, k, head_size, cache)
    assert_close("apply_rope_inplace", q, expected[0].flatten(1), ROUNDED_ONCE[dtype])
    assert_close("apply_rope_inplace", k, expected[1], ROUNDED_ONCE[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("head_size", "rotary"), [(64, 64), (48, 10), (128, 64)])
def test_interleaved(dtype, head_size, rotary, rng):
    """Pairs (2i, 2i + 1) turn as complex numbers."""
    cache = rk.rope_cos_sin_cache(rotary, 300, 1e4)
    positions = torch.randint(0, 300, (9,), generator=rng)
    q = spread((9, 3, head_size), dtype, rng)
    wide = q.double()
    pairs = torch.view_as_complex(wide[..., :rotary].unflatten(-1, (-1, 2)).contiguous())
    cos, sin = cache[positions].double().chunk(2, -1)
    turned = torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2)
    expected = torch.cat((turned, wide[..., rotary:]), -1)
    rk.reference.apply_rope_inplace(positions, wide, None, head_size, cache, is_neox=False)
    assert_close("reference.apply_rope_inplace", wide, expected, DEFINITION)
    rk.apply_rope_inplace(positions, q, None, head_size, cache, is_neox=False)
    assert_close("apply_rope_inplace", q, expected, ROUNDED_ONCE[dtype])


@pytest.mark.parametrize("is_neox", [True, False])
def test_strided_heads_and_guards(is_neox, rng):
    """q and k as views of one qkv buffer; what lies between keeps its bits."""
    tokens = 7
    dim = 32
    buffer = guarded((tokens, 10, dim), torch.bfloat16, gap=16)
    buffer.view.copy_(spread((tokens, 10, dim), torch.bfloat16, rng))
    before = buffer.view.clone()
    q = buffer.view[:, 0:6:2]
    k = buffer.view[:, 7:9]
    cache = rk.rope_cos_sin_cache(dim, 64, 1e4)
    positions = torch.randint(0, 64, (tokens,), generator=rng)
    apart_q = q.contiguous()
    apart_k = k.contiguous()
    rk.apply_rope_inplace(positions, q, k, dim, cache, is_neox=is_neox)
    rk.apply_rope_inplace(positions, apart_q, apart_k, dim, cache, is_neox=is_neox)
    assert_same_bits(q, apart_q)
    assert_same_bits(k, apart_k)
    assert_same_bits(buffer.view[:, [1, 3, 5, 6, 9]], before[:, [1, 3, 5, 6, 9]])
    buffer.check()


def test_position_zero_is_the_identity(rng):
    q = spread((3, 2, 64), torch.float16, rng)
    before = q.clone()
    cache = rk.rope_cos_sin_cache(64, 4, 1e4)
    rk.apply_rope_inplace(torch.zeros(3, dtype=torch.int64), q, None, 64, cache)
    assert_same_bits(q, before)


def test_norm_and_nan(rng):
    """A rotation keeps lengths; a NaN reaches its own pair only."""
    q = spread((5, 4, 64), torch.float32, rng)
    lengths = q.double().norm(dim=-1)
    cache = rk.rope_cos_sin_cache(64, 99, 1e4)
    positions = torch.randint(0, 99, (5,), generator=rng)
    rk.apply_rope_inplace(positions, q, None, 64, cache)
    assert torch.allclose(q.double().norm(dim=-1), lengths, rtol=1e-6)
    q[2, 1, 5] = math.nan
    rk.apply_rope_inplace(positions, q, None, 64, cache)
    assert torch.isnan(q).nonzero().tolist() == [[2, 1, 5], [2, 1, 37]]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("positions", torch.zeros(2), TypeError),
        ("positions", torch.zeros(3, dtype=torch.int64), ValueError),
        pytest.param("positions", torch.tensor([0, 8]), ValueError, marks=pytest.mark.cpu_only),
        pytest.param("positions", torch.tensor([-1, 0]), ValueError, marks=pytest.mark.cpu_only),
        ("key", torch.ones(2, 16, dtype=torch.float16), TypeError),
        ("key", torch.ones(2, 24), ValueError),
        ("query", torch.ones(2, 16, dtype=torch.float64), TypeError),
        ("cos_sin_cache", torch.ones(8, 16, dtype=torch.float64), TypeError),
        ("cos_sin_cache", torch.ones(8, 32), ValueError),
        ("cos_sin_cache", torch.ones(8, 15), ValueError),
    ],
)
def test_errors_leave_the_tensors_alone(name, value, error):
    args = {
        "positions": torch.tensor([1, 2]),
        "query": torch.ones(2, 32),
        "key": torch.ones(2, 16),
        "head_size": 16,
        "cos_sin_cache": rk.rope_cos_sin_cache(16, 8, 1e4),
    } | {name: value}
    with pytest.raises(error):
        rk.apply_rope_inplace(**args)
    assert (args["query"] == 1).all() and (args["key"] == 1).all()


def test_rows_more_than_2_31_elements_apart(rng):
    q = distant((2, 64), torch.bfloat16)
    q.copy_(spread((2, 64), torch.bfloat16, rng))
    near = q.contiguous()
    cache = rk.rope_cos_sin_cache(32, 9, 1e4)
    rk.apply_rope_inplace(torch.tensor([3, 8]), q, None, 32, cache)
    rk.apply_rope_inplace(torch.tensor([3, 8]), near, None, 32, cache)
    assert_same_bits(q, near)
