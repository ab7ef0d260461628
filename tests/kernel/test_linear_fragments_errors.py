"""What a Hopper GPU refuses of quantized weights, and products with them in captured graphs."""

from __future__ import annotations

import pytest
import torch

import radix_kernels as rk

# As imported: what the tests of single ops patch copies and waits, which a capture does not allow.
from radix_kernels import linear, linear_silu_and_mul, pack_weight
from tests.kernel.helpers import assert_same_bits, integers, spread
from tests.kernel.quantized_cases import FORMS, make_form, random_weight

NIBBLES = make_form("int4", 32, torch.float16, zeros=True)


@pytest.fixture(autouse=True)
def _on_gpu(request):
    if request.config.getoption("--device") != "cuda":
        pytest.skip("the layout is of Hopper's library")


def test_kinds_that_only_the_cpu_has(rng):
    codes = integers(-127, 128, (32, 256), rng).to(torch.int8)
    scales = torch.ones(32, 1)
    for kind in ("w8a8", "q6_k", "q5_k"):
        with pytest.raises(NotImplementedError, match="which has int8, int4, mxfp4"):
            rk.pack_weight(codes, scales, kind)
    nibbles = random_weight(NIBBLES, 32, 64, rng).arguments
    for kind in ("w4a8", "q4_k"):
        with pytest.raises(NotImplementedError, match="which has int8, int4, mxfp4"):
            rk.pack_weight(**{**nibbles, "kind": kind})


def test_what_the_library_does_not_pack_is_held_in_rows_of_codes(rng):
    given = random_weight(NIBBLES, 32, 64, rng).arguments
    codes = integers(-127, 128, (32, 64), rng).to(torch.int8)
    for packed in (
        rk.pack_weight(**{**given, "zeros": None}, mins=given["scales"]),
        rk.pack_weight(**given, dtype=torch.float32),
        rk.pack_weight(codes, torch.ones(32, 4), "int8", group=16),
    ):
        assert packed.layout == "codes"


# Half a step of the largest element's; of 4 bits a whole one, for positive codes end at 7.
@pytest.mark.parametrize(("kind", "allowed"), [("int8", 0.008), ("int4", 0.13)])
def test_floats_are_quantized(kind, allowed, rng):
    w = spread((96, 256), torch.bfloat16, rng)
    packed = rk.pack_weight(w, kind=kind)
    assert packed.layout == "fragments64"
    rows = rk.embedding(torch.arange(96), packed).double()
    error = (rows - w.double()).abs() / w.double().abs().amax(1, keepdim=True)
    assert 0 < error.max() < allowed


def test_arguments_of_packing(rng):
    given = random_weight(NIBBLES, 32, 64, rng).arguments
    zeros = given["zeros"].clone()
    zeros[3, 1] = 17
    with pytest.raises(ValueError, match="zeros has the value 17, expected 0 to 16"):
        rk.pack_weight(**{**given, "zeros": zeros})
    with pytest.raises(ValueError, match="zeros"):
        rk.pack_weight(**{**given, "zeros": zeros[:, :1].clamp(max=16)})
    with pytest.raises(ValueError, match="scales"):
        rk.pack_weight(**{**given, "scales": given["scales"][:31]})
    with pytest.raises(TypeError, match="uint8"):
        rk.pack_weight(**{**given, "w": given["w"].to(torch.int8)})
    with pytest.raises(ValueError, match="group is 48"):
        rk.pack_weight(**{**given, "group": 48})
    floats = random_weight(FORMS[-1], 32, 64, rng).arguments
    powers = floats["scales"].clone()
    powers[0, 0] = 253
    with pytest.raises(ValueError, match="scales has the value 253, expected 0 to 252"):
        rk.pack_weight(**{**floats, "scales": powers})
    with pytest.raises(ValueError, match="scales"):
        rk.pack_weight(**{**floats, "scales": powers[:, :0]})


def test_arguments_of_products(rng):
    packed = rk.pack_weight(**random_weight(NIBBLES, 32, 64, rng).arguments)
    for tokens in (3, 100):
        x = spread((tokens, 64), torch.bfloat16, rng)
        with pytest.raises(ValueError, match="last dimension 60"):
            rk.linear(x[:, :60], packed)
        with pytest.raises(TypeError, match="bfloat16"):
            rk.linear(x.half(), packed)
        with pytest.raises(ValueError, match="out"):
            rk.linear(x, packed, out=torch.empty(tokens + 1, 32, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match="residual"):
            rk.linear(x, packed, residual=x)
        with pytest.raises(ValueError, match="bias"):
            rk.linear(x, packed, bias=x[0])
    deep = spread((2, 3, 64), torch.bfloat16, rng)
    with pytest.raises(ValueError, match="out"):
        rk.linear(deep, packed, out=torch.empty(3, 2, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("tokens", [1, 20, 100])
@pytest.mark.parametrize("form", FORMS[::3], ids=str)
def test_a_captured_graph_serves_other_values(form, tokens, rng):
    weight = random_weight(form, 512, 256, rng)
    there = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in weight.arguments.items()
    }
    packed = pack_weight(**there)
    x = torch.zeros(tokens, 256, dtype=torch.bfloat16, device="cuda")

    def step():
        return linear(x, packed), linear_silu_and_mul(x, packed)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        x.copy_(spread((tokens, 256), torch.bfloat16, rng))
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert_same_bits(got, expected)
