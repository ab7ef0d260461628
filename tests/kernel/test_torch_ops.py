"""The torch.library wrappers: schemas, fakes, and torch.compile's tracing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import radix_kernels as rk
from radix_kernels import torch_ops
from tests.child import IMPORT_PATH
from tests.kernel.attention_cases import make_case
from tests.kernel.helpers import assert_same_bits, spread

# autograd is not offered: the ops are for inference
CHECKS = ("test_schema", "test_faketensor")


def problems(rng):
    def t(*shape: int) -> torch.Tensor:
        return spread(shape, torch.float32, rng)

    def caches() -> list[torch.Tensor]:
        return [torch.zeros(4, 8, 2, 16) for _ in range(2)]

    slots = torch.tensor([3, -1, 31])
    table = rk.rope_cos_sin_cache(16, 32, 1e4)
    return {
        "rmsnorm": (t(3, 32), t(32)),
        "fused_add_rmsnorm": (t(3, 32), t(3, 32), t(32), 1e-5),
        "silu_and_mul": (t(2, 5, 32),),
        "gelu_and_mul": (t(4, 32),),
        "gelu_tanh_and_mul": (t(4, 32),),
        "apply_rope_inplace": (torch.tensor([0, 5, 31]), t(3, 64), t(3, 32), 16, table),
        "store_kv_cache": (t(3, 2, 16), t(3, 2, 16), *caches(), slots),
        "flash_attn_with_kvcache": make_case([(2, 9), (1, 5)], rng, dim=32).args,
    }


def attention_calls(rng):
    """Values of another size, INT8 KV, FP8 KV, and FP8 queries."""
    one = torch.ones(1)
    wide = make_case([(2, 9), (1, 5)], rng, dim=32, v_dim=48, dtype=torch.bfloat16).args
    plain = make_case([(2, 9), (1, 5)], rng, dim=32, dtype=torch.bfloat16).args

    def narrow(args, dtype, *which):
        return tuple(x.nan_to_num(1).to(dtype) if i in which else x for i, x in enumerate(args))

    scales = {
        name: torch.rand(plain[1].shape[:3], generator=rng) / 100 for name in ("k_scale", "v_scale")
    }
    fp8 = torch.float8_e4m3fn
    return {
        "values of another size": (wide, {}),
        "int8 KV": (narrow(plain, torch.int8, 1, 2), scales),
        "fp8 KV": (narrow(plain, fp8, 1, 2), {"k_scale": one, "v_scale": one}),
        "fp8": (narrow(wide, fp8, 0, 1, 2), {"q_scale": one, "k_scale": one, "v_scale": one}),
    }


OPS = list(problems(torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, rng):
    args = problems(rng)[op]
    torch.library.opcheck(getattr(torch.ops.radix_kernels, op), args, test_utils=CHECKS)


@pytest.mark.parametrize("op", OPS)
def test_same_bits_as_the_function(op, rng):
    args = problems(rng)[op]
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    got = getattr(torch_ops, op)(*args)
    expected = getattr(rk, op)(*copies)
    assert (got is None) == (expected is None)
    if got is not None:
        assert_same_bits(got, expected)
    for mine, theirs in zip(args, copies, strict=True):
        if isinstance(mine, torch.Tensor) and mine.is_floating_point():
            assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.filterwarnings("ignore:radix_kernels runs its reference")
@pytest.mark.parametrize("kind", attention_calls(torch.Generator().manual_seed(0)))
def test_attention_of_every_kind(kind, rng):
    args, scales = attention_calls(rng)[kind]
    op = torch.ops.radix_kernels.flash_attn_with_kvcache
    # The check of the schema multiplies its inputs, which torch cannot do with FP8.
    torch.library.opcheck(op, args, scales, test_utils=CHECKS[1:] if "fp8" in kind else CHECKS)
    got = op(*args, **scales)
    assert got.shape == (*args[0].shape[:2], args[2].shape[-1]) and got.dtype == torch.bfloat16
    assert_same_bits(got, rk.flash_attn_with_kvcache(*args, **scales))


def test_compile_traces_in_one_graph(rng):
    x = spread((4, 64), torch.bfloat16, rng)
    w = torch.ones(64, dtype=torch.bfloat16)

    def block(x):
        return torch_ops.silu_and_mul(torch_ops.rmsnorm(x, w)) + 1

    traced = torch.compile(block, backend="eager", fullgraph=True)
    assert_same_bits(traced(x), block(x))


def test_nothing_is_registered_before_the_import():
    code = (
        "import torch, radix_kernels as rk; rk.rmsnorm(torch.ones(1, 8), torch.ones(8));"
        "print(hasattr(torch.ops.radix_kernels, 'rmsnorm'))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": IMPORT_PATH},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert result.stdout.strip() == "False"
