"""The Triton attention kernels by themselves, checked against the oracle."""

from __future__ import annotations

import pytest
import torch

from tests.kernel.attention_cases import (
    amplitude,
    oracle,
    varlen_args,
)
from tests.kernel.helpers import assert_close, guarded
from tests.kernel.triton_device import DEVICE, GPU, TRITON_ATTENTION, triton_module

rt = triton_module("attention")


SCALES = ("k_scale", "v_scale", "q_scale")


def launch(case, out, *, lse=None, varlen=False, **options):
    left, right = options.get("window_size", (-1, -1))
    tensors = {name: options.get(name) for name in ("sinks", *SCALES)}
    tensors = {name: None if x is None else x.to(DEVICE) for name, x in tensors.items()}
    device_out = out.to(DEVICE)
    device_lse = None if lse is None else lse.to(DEVICE)
    op = rt.flash_attn_varlen if varlen else rt.flash_attn_with_kvcache
    args = varlen_args(case) if varlen else case.args
    op(
        *(x.to(DEVICE) for x in args),
        options.get("softmax_scale", case.q.shape[-1] ** -0.5),
        options.get("causal", True),
        left,
        right,
        options.get("softcap", 0.0),
        tensors["sinks"],
        device_out,
        device_lse,
        **{name: tensors[name] for name in SCALES},
        max_seqlen_q=options.get("max_seqlen_q", 0),
    )
    if GPU:
        out.copy_(device_out)
        if lse is not None:
            lse.copy_(device_lse)


def run(case, rng, *, exact=None, out_dtype=None, tolerance=None, **options):
    """Check out, all of it and nothing beside it, and lse. exact: the case of the numbers that FP8
    stands for."""
    if options.get("sinks"):
        options["sinks"] = torch.randn(case.q.shape[1], generator=rng)
    dtype = out_dtype or case.q.dtype
    expected, expected_lse = oracle(exact or case, **options)
    out = guarded(tuple(expected.shape), dtype, gap=8)
    lse = torch.full(case.q.shape[:2], float("nan"))
    launch(case, out.view, lse=lse, **options)
    out.check()
    rounded = amplitude(exact or case, **options)
    assert_close(
        "triton flash_attn", out.view, expected, tolerance or TRITON_ATTENTION[dtype], rounded
    )
    assert_close("triton flash_attn lse", lse, expected_lse, (4e-6, 2e-5))


def poison_partials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a split has not written must not be used."""
    original = rt._partials

    def partials(q, splits, dim):
        parts = original(q, splits, dim)
        return tuple(None if part is None else part.fill_(float("nan")) for part in parts)

    monkeypatch.setattr(rt, "_partials", partials)


def shorten_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 64 keys, the largest tile's: the interpreter is slow."""
    monkeypatch.setattr(rt, "_SPLIT_KEYS", 64)
