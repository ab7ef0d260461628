"""What the attention ops say to arguments that no kernel should see."""

from __future__ import annotations

import math
import types

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _dispatch
from tests.kernel.attention_cases import Case, make_case, oracle, varlen_args
from tests.kernel.helpers import (
    ATTENTION,
    FLOATS,
    ROUNDED_ONCE,
    assert_close,
    assert_same_bits,
    spread,
)


def call(op: str, case: Case, **options):
    return getattr(rk, op)(
        *(case.args if op == "flash_attn_with_kvcache" else varlen_args(case)), **options
    )


OPS = pytest.mark.parametrize("op", ["flash_attn_with_kvcache", "flash_attn_varlen"])


@OPS
@pytest.mark.parametrize("left", [2**30, 2**31 - 1, 2**31, 2**70])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_longer_than_any_row_is_none(op, left, causal, rng):
    case = make_case([(5, 40), (9, 4), (1, 1)], rng, dim=16)
    got = call(op, case, window_size=(left, -1), causal=causal)
    assert_close(op, got, oracle(case, causal=causal)[0], ATTENTION[torch.float32])


@OPS
@pytest.mark.parametrize(
    "options",
    [
        {"max_seqlen_q": 2.0},
        {"max_seqlen_q": "2"},
        {"window_size": (3.0, 0)},
        {"window_size": 3},
        {"window_size": (3,)},
    ],
    ids=str,
)
def test_integers(op, options, rng):
    with pytest.raises(TypeError, match=f"{op}: {next(iter(options))}.*expected"):
        call(op, make_case([(2, 5)], rng, dim=16), **options)


@OPS
@pytest.mark.parametrize("softcap", [math.inf, math.nan, -1.0, 1e39])
def test_soft_caps(op, softcap, rng):
    with pytest.raises(ValueError, match="softcap"):
        call(op, make_case([(2, 5)], rng, dim=16), softcap=softcap)


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("wrong", [None, [1, 2]], ids=["None", "a list"])
def test_what_is_no_tensor(index, wrong, rng):
    case = make_case([(2, 5)], rng, dim=16)
    args = list(case.args)
    args[index] = wrong
    with pytest.raises(TypeError):
        rk.flash_attn_with_kvcache(*args)
    if index < 5:
        args = list(varlen_args(case))
        args[index] = wrong
        with pytest.raises(TypeError):
            rk.flash_attn_varlen(*args)


def test_queries_without_a_row(rng):
    case = make_case([(2, 5)], rng, dim=16)
    nobody = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="no rows"):
        rk.flash_attn_with_kvcache(*case.args[:3], case.page_table[:0], case.kv_lens[:0], nobody)
    q, k, v, _, _ = varlen_args(case)
    with pytest.raises(ValueError, match="no rows"):
        rk.flash_attn_varlen(q, k, v, nobody, nobody)


def test_strided_sinks_are_refused(rng):
    case = make_case([(2, 5)], rng, dim=16)
    with pytest.raises(ValueError, match="sinks"):
        rk.flash_attn_with_kvcache(*case.args, sinks=torch.randn(8)[::2])


def merge_case(rng, dtype=torch.float32):
    sides = [(spread((5, 3, 16), dtype, rng), torch.randn(5, 3, generator=rng)) for _ in range(2)]
    return [x for side in sides for x in side]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_merge_state_in_place(dtype, rng):
    """out and lse may be side a's."""
    a, la, b, lb = merge_case(rng, dtype)
    expected, expected_lse = rk.merge_state(a, la, b, lb)
    exact, _ = rk.reference.merge_state(a.double(), la.double(), b.double(), lb.double())
    got, lse = rk.merge_state(a, la, b, lb, out=a, lse=la)
    assert got is a and lse is la
    assert_same_bits(a, expected)
    assert_same_bits(la, expected_lse)
    assert_close("merge_state", a, exact, ROUNDED_ONCE[dtype])


@pytest.mark.parametrize(
    ("index", "change", "error"),
    [
        (0, lambda x: x.double(), TypeError),
        (0, lambda x: x[0], ValueError),
        (1, lambda x: x.half(), TypeError),
        (1, lambda x: x[:, :1], ValueError),
        (2, lambda x: x.half(), TypeError),
        (2, lambda x: x[:2], ValueError),
        (3, lambda x: x.double(), TypeError),
        (3, lambda x: x[..., None], ValueError),
    ],
)
def test_merge_state_errors(index, change, error, rng):
    args = merge_case(rng)
    args[index] = change(args[index])
    with pytest.raises(error):
        rk.merge_state(*args, out=torch.empty(5, 3, 16), lse=torch.empty(5, 3))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"out": torch.empty(5, 3, 16, dtype=torch.float16)}, TypeError),
        ({"out": torch.empty(5, 3, 32)}, ValueError),
        ({"lse": torch.empty(5, 3, dtype=torch.float64)}, TypeError),
        ({"lse": torch.empty(3, 5)}, ValueError),
    ],
    ids=["dtype of out", "shape of out", "dtype of lse", "shape of lse"],
)
def test_merge_state_errors_of_outputs(wrong, error, rng):
    with pytest.raises(error):
        rk.merge_state(*merge_case(rng), **wrong)


def test_triton_by_name(rng, monkeypatch, request):
    """It runs instead of the native kernel and the reference, with what the caller gave."""
    if request.config.getoption("--device") != "cpu":
        pytest.skip("arguments are copied to the device")
    given = []
    kernels = types.ModuleType("radix_kernels.triton")
    kernels.flash_attn_with_kvcache = lambda *args: given.append(args)
    monkeypatch.setattr(_dispatch, "triton", kernels)
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: True)
    case = make_case([(2, 5), (1, 3)], rng, dim=16)
    out = torch.full_like(case.q, 7.0)
    options = {"window_size": (4, 0), "softcap": 3.0, "softmax_scale": 0.5, "max_seqlen_q": 2}
    result = rk.flash_attn_with_kvcache(*case.args, out=out, implementation="triton", **options)
    assert result is out and (out == 7.0).all()
    [args] = given
    assert all(a is b for a, b in zip(args, case.args, strict=False))
    assert args[6:14] == (0.5, True, 4, 0, 3.0, None, out, None) and args[17] == 2


def test_an_implementation_that_is_not_there(rng, monkeypatch):
    case = make_case([(2, 5)], rng, dim=16)
    with pytest.raises(ValueError, match="implementation is 'cuda', expected 'auto' or 'triton'"):
        rk.flash_attn_with_kvcache(*case.args, implementation="cuda")
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: False)
    with pytest.raises(RuntimeError, match="flash_attn_with_kvcache: Triton is not installed"):
        rk.flash_attn_with_kvcache(*case.args, implementation="triton")
