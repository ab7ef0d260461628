"""The experts' products: Triton's interpreter on the CPU, the kernels where there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radix_kernels as rk
from radix_kernels.gating import read_gating
from tests.kernel.experts_cases import ACTIVATIONS, FNUZ, FP8, TOLERANCE, Experts, make
from tests.kernel.helpers import FLOATS, assert_close, assert_same_bits, guarded, integers
from tests.kernel.triton_device import DEVICE, INTERPRETED, triton_module

rt = triton_module("moe")


TOLERANCE = dict(TOLERANCE)
if INTERPRETED:  # the interpreter cuts float32 to bfloat16 where a chip rounds to the nearest
    TOLERANCE[torch.bfloat16] = (1.5e-2, 6e-2)
pytestmark = [
    pytest.mark.cover("values"),
    pytest.mark.usefixtures("interpreter_widens_bfloat16"),
]


def run(case: Experts, out: torch.Tensor, tiles: tuple[Any, Any] | None = None) -> None:
    args: list[Any] = [t.to(DEVICE) for t in (case.x, case.w1, case.w2, case.weights, case.ids)]
    options = [case.options.get(name) for name in ("w1_scale", "w2_scale", "expert_map")]
    there = out.to(DEVICE)
    args += [None if t is None else t.to(DEVICE) for t in options]
    fp8 = case.options.get("use_fp8_w8a8", False)
    biases = [case.options.get(name) for name in ("bias1", "bias2")]
    more = {
        "bias1": None if biases[0] is None else biases[0].to(DEVICE),
        "bias2": None if biases[1] is None else biases[1].to(DEVICE),
        "gating": read_gating("fused_experts", case.options.get("activation", "silu")),
    }
    if tiles is None:
        rt.fused_experts(*args, there, fp8, **more)
    else:
        rt.run(*args, there, *tiles, fp8, **more)
    out.copy_(there)


def check(
    case: Experts,
    tiles: tuple[Any, Any] | None = None,
    tolerance: tuple[float, float] | None = None,
) -> torch.Tensor:
    out = guarded(tuple(case.x.shape), case.x.dtype, gap=8)
    run(case, out.view, tiles)
    out.check()
    assert_close("fused_experts", out.view, case.oracle(), tolerance or TOLERANCE[case.x.dtype])
    return out.view


# (tokens, experts, topk, hidden, inter): few pairs, one token, sorted, odd sizes, more tokens than
# a block has rows.
SHAPES = [
    (1, 4, 2, 64, 32),
    (7, 8, 2, 128, 64),
    (5, 3, 3, 72, 40),
    (40, 4, 2, 64, 48),
    (90, 3, 1, 80, 16),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_experts(shape, dtype, rng):
    check(make(*shape, dtype, rng))


def test_reference(rng):
    case = make(9, 5, 2, 48, 24, torch.float32, rng)
    args = [t.double() for t in (case.x, case.w1, case.w2, case.weights)]
    assert_close(
        "fused_experts", rk.reference.fused_experts(*args, case.ids), case.oracle(), (1e-12, 1e-11)
    )
    out = rk.fused_experts(case.x, case.w1, case.w2, case.weights, case.ids)
    assert_close("fused_experts", out, case.oracle(), TOLERANCE[torch.float32])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 2, 64, 32), (40, 4, 2, 72, 40)], ids=str)
def test_activations_and_biases(shape, activation, rng):
    case = make(*shape, torch.float16, rng).with_biases(rng, torch.float16)
    case.options["activation"] = activation
    case.ids[case.ids == 3] = 9  # an expert without pairs, whose bias adds nothing
    check(case)
    wide = {name: case.options[name] for name in ("bias1", "bias2")}
    exact = rk.reference.fused_experts(
        *[t.double() for t in (case.x, case.w1, case.w2, case.weights)],
        case.ids,
        activation=activation,
        **wide,
    )
    assert_close("fused_experts", exact, case.oracle(), (1e-12, 1e-11))


@pytest.mark.parametrize("name", ["bias1", "bias2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_bias(name, dtype, rng):
    case = make(20, 3, 2, 64, 32, torch.bfloat16, rng).with_biases(rng, dtype)
    del case.options[name]
    check(case)


@pytest.mark.parametrize("swap", [False, True])
def test_biases_in_tiles_of_odd_sizes(swap, rng):
    case = make(30, 3, 2, 96, 80, torch.float16, rng).with_biases(rng, torch.float32)
    case.options["activation"] = "swiglu_clamped"
    tiles = rt.Tiles(block_m=16, block_n=32, block_k=32, group=3, swap=swap)
    check(case, (tiles, tiles))


@pytest.mark.parametrize("scales", ["tensor", "block"])
def test_biases_of_fp8_experts(scales, rng):
    case = make(20, 3, 2, 256, 128, torch.bfloat16, rng, scales=scales)
    case.options["activation"] = "gelu"
    check(case.with_biases(rng, torch.float32))


def test_the_clamp_keeps_nan_and_bounds_infinity(rng):
    case = make(4, 2, 2, 64, 32, torch.float32, rng).with_biases(rng, torch.float32)
    case.options["activation"] = "swiglu_clamped"
    bias = case.options["bias1"]
    bias[:, 0] = float("inf")  # a gate that becomes 7
    bias[:, 33] = -float("inf")  # an up that becomes -7
    out = check(case)
    assert out.isfinite().all()
    bias[1, 40] = float("nan")
    run(case, out)
    assert out.isnan().all()


@pytest.mark.parametrize("code", [FP8, FNUZ], ids=str)
@pytest.mark.parametrize("scales", ["tensor", "block"])
@pytest.mark.parametrize("shape", [(2, 3, 2, 192, 136), (40, 2, 2, 256, 128)], ids=str)
def test_fp8(scales, shape, code, rng):
    case = make(*shape, torch.bfloat16, rng, scales=scales, code=code)
    check(case)
    args = (case.x.double(), case.w1, case.w2, case.weights.double(), case.ids)
    exact = rk.reference.fused_experts(*args, **case.options)
    assert_close("fused_experts", exact, case.oracle(), (1e-12, 1e-11))


@pytest.mark.parametrize("shape", [(2, 3, 2, 256, 128), (40, 2, 2, 128, 256)], ids=str)
def test_fp8_activations(shape, rng):
    case = make(*shape, torch.bfloat16, rng, scales="block")
    case.options["use_fp8_w8a8"] = True
    check(case, tolerance=(4e-2, 0.4) if shape[0] < 8 else (2.5e-2, 0.4))
    case.x = case.x.double()
    exact = rk.reference.fused_experts(
        case.x, case.w1, case.w2, case.weights.double(), case.ids, **case.options
    )
    # Its scales are float32, so that a value on a border may take the other code.
    assert_close("fused_experts", exact, case.oracle(), (5e-3, 0.2))


@pytest.mark.parametrize("tokens", [6, 50])
def test_expert_map_and_foreign_ids(tokens, rng):
    case = make(tokens, 3, 3, 64, 32, torch.float16, rng, named=8)
    case.options["expert_map"] = torch.tensor([-1, 2, 3, 0, 1030, 2**30, 1, -1], dtype=torch.int32)
    case.ids[1, :] = -1
    case.ids[2, 0] = 99
    out = check(case)
    assert (out[1] == 0).all()


@pytest.mark.parametrize("tokens", [4, 40])
def test_all_tokens_to_one_expert(tokens, rng):
    case = make(tokens, 6, 2, 64, 32, torch.float16, rng)
    case.ids[:] = torch.tensor([4, 4])
    check(case)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("few", [False, True])
def test_tiles(swap, few, rng):
    """Tiles that no table may hold today."""
    case = make(8 if few else 70, 3, 2, 96, 80, torch.float16, rng)
    up = rt.Tiles(block_m=16, block_n=32, block_k=32, group=3, swap=swap)
    down = rt.Tiles(block_m=16, block_n=64, block_k=64, group=2, swap=swap)
    check(case, (up, down))


@pytest.mark.parametrize("tokens", [3, 60])
def test_repeats_bit_by_bit(tokens, rng):
    case = make(tokens, 4, 2, 64, 32, torch.bfloat16, rng)
    first = torch.empty_like(case.x)
    second = torch.empty_like(case.x)
    run(case, first)
    run(case, second)
    assert_same_bits(first, second)


def test_nan_stays_in_its_token(rng):
    case = make(40, 4, 2, 64, 32, torch.float16, rng)
    clean = torch.empty_like(case.x)
    out = torch.empty_like(case.x)
    run(case, clean)
    case.x[7, 3] = float("nan")
    run(case, out)
    others = [t for t in range(40) if t != 7]
    assert torch.isnan(out[7]).all()
    assert_same_bits(out[others], clean[others])


def test_nothing_to_do(rng):
    case = make(1, 4, 2, 64, 32, torch.float16, rng)
    case.x = case.x[:0]
    case.weights = case.weights[:0]
    case.ids = case.ids[:0]
    out = torch.empty_like(case.x)
    run(case, out)
    case = make(2, 4, 2, 64, 32, torch.float16, rng)
    case.weights = case.weights[:, :0].contiguous()
    case.ids = case.ids[:, :0].contiguous()
    assert (check(case) == 0).all()


def test_tiles_fit_every_batch():
    for pairs in (1, 8, 15, 16, 17, 64, 500, 4096, 32768, 1 << 20):
        for experts in (1, 8, 128, 512):
            up, down = rt.choose_tiles(pairs, experts, 2, 2)
            assert up.block_m == down.block_m >= 16
            assert pairs > rt.FEW_PAIRS or up.block_m >= pairs


def test_errors(rng):
    case = make(2, 4, 2, 64, 32, torch.float32, rng)
    x = case.x
    w1 = case.w1
    w2 = case.w2
    weights = case.weights
    ids = case.ids
    with pytest.raises(ValueError, match="w1"):
        rk.fused_experts(x, w1[:, 1:], w2, weights, ids)
    with pytest.raises(ValueError, match="w2"):
        rk.fused_experts(x, w1, w2[:3], weights, ids)
    with pytest.raises(TypeError, match="topk_ids"):
        rk.fused_experts(x, w1, w2, weights, ids.long())
    with pytest.raises(TypeError, match="w1"):
        rk.fused_experts(x, w1.half(), w2.half(), weights, ids)
    with pytest.raises(ValueError, match="w1_scale"):
        rk.fused_experts(x, w1.to(FP8), w2.to(FP8), weights, ids)
    with pytest.raises(ValueError, match="w1_scale"):
        rk.fused_experts(x, w1, w2, weights, ids, w1_scale=torch.ones(4), w2_scale=torch.ones(4))
    with pytest.raises(ValueError, match="w2_scale"):
        rk.fused_experts(
            x, w1.to(FP8), w2.to(FP8), weights, ids, w1_scale=torch.ones(4), w2_scale=torch.ones(3)
        )
    with pytest.raises(ValueError, match="out"):
        rk.fused_experts(x, w1, w2, weights, ids, out=x[:1].clone())


def test_errors_of_biases_and_activations(rng):
    case = make(2, 4, 2, 64, 32, torch.float32, rng)
    args = (case.x, case.w1, case.w2, case.weights, case.ids)
    with pytest.raises(ValueError, match=r"bias1 has shape \[4, 32\], expected \[4, 64\]"):
        rk.fused_experts(*args, bias1=torch.zeros(4, 32))
    with pytest.raises(ValueError, match="bias2 is not contiguous"):
        rk.fused_experts(*args, bias2=torch.zeros(64, 4).T)
    with pytest.raises(TypeError, match="bias2 has dtype float16"):
        rk.fused_experts(*args, bias2=torch.zeros(4, 64).half())
    with pytest.raises(ValueError, match="activation is 'relu', expected one of silu, gelu"):
        rk.fused_experts(*args, activation="relu")
    with pytest.raises(ValueError, match="limit is 0"):
        rk.ClampedSwiGlu(limit=0.0)
    with pytest.raises(ValueError, match="alpha is nan"):
        rk.ClampedSwiGlu(alpha=float("nan"))


def test_random_batches(rng):
    for _ in range(3):
        tokens, experts, topk, hidden, inter = (
            int(integers(1, n, (1,), rng)) for n in (60, 6, 4, 100, 60)
        )
        check(make(tokens, max(experts, topk), topk, hidden, inter, torch.float16, rng))
