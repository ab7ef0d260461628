"""Attention over an INT8 cache with a scale for each token and head, which the CPU has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radix_kernels as rk
from tests.kernel.attention_cases import (
    OPTIONS,
    Case,
    amplitude,
    make_case,
    oracle,
    quantized,
    random_rows,
)
from tests.kernel.helpers import (
    ATTENTION,
    FLOATS,
    assert_close,
)


def run_int8(case: Case, scales: dict[str, Any], options: dict[str, Any]) -> None:
    expected, expected_lse = oracle(case, **options)
    given = {**options, **scales}
    out, lse = rk.flash_attn_with_kvcache(*case.args, **given, return_softmax_lse=True)
    assert_close(
        "flash_attn_with_kvcache INT8",
        out,
        expected,
        ATTENTION[case.q.dtype],
        amplitude(case, **options),
    )
    assert_close("flash_attn_with_kvcache INT8 lse", lse, expected_lse, (4e-6, 2e-5))
    exact = rk.reference.flash_attn_with_kvcache(case.q.double(), *case.args[1:], **given)
    assert_close("reference.flash_attn_with_kvcache INT8", exact, expected, (1e-12, 1e-10))


@pytest.mark.cpu_only
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int8(options, dtype, rng):
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.randn(4, generator=rng)
    rows = [(1, 90), (3, 3), (5, 70), (1, 600), (0, 20), (40, 545)]
    run_int8(*quantized(make_case(rows, rng, dtype=dtype, dim=80, page_size=7)), options)


@pytest.mark.cpu_only
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("hnd", [False, True])
def test_int8_page_sizes(page_size, hnd, rng):
    rows = [*random_rows(5, rng), (1, 530)]  # the last in several parts
    case, scales = quantized(
        make_case(rows, rng, page_size=page_size, hnd=hnd, dtype=torch.bfloat16)
    )
    assert case.k_cache.is_contiguous() == (not hnd or page_size == 1)
    run_int8(case, scales, {})


@pytest.mark.cpu_only
def test_int8_errors(rng):
    case, scales = quantized(make_case([(2, 5)], rng))
    for wrong in ({}, {"k_scale": scales["k_scale"]}, scales | {"v_scale": torch.ones(1)}):
        with pytest.raises(ValueError):
            rk.flash_attn_with_kvcache(*case.args, **wrong)
    with pytest.raises(TypeError):
        rk.flash_attn_with_kvcache(*case.args, **(scales | {"v_scale": scales["v_scale"].double()}))
