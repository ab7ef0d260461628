"""Quantized weights on a Hopper GPU: what is packed, and products against float64 of the codes."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _choices
from tests.kernel.gemm_cases import HALVES
from tests.kernel.helpers import assert_close, assert_same_bits, guarded, integers, spread
from tests.kernel.quantized_cases import FORMS, make_form, random_weight

# Rounded once, to float64 of the weight as the product takes it; of more rows than the kernels
# take, torch may round partial sums.
ROUNDED = {torch.float16: (5e-4, 7e-4), torch.bfloat16: (3.95e-3, 4.3e-3)}
COMPOSED = {torch.float16: (2e-3, 6e-3), torch.bfloat16: (1.2e-2, 4e-2)}
WIDE = (1e-5, 1e-4)
# To float64 of the codes, where each weight is rounded too: terms of either sign, whose sum keeps
# their roundings where they cancel.
OF_CODES = {torch.float16: (4.5e-4, 2e-3), torch.bfloat16: (3.5e-3, 1.6e-2)}
EXACT_ROWS = 16  # up to so many rows of x nothing is rounded on the way
EITHER_ROWS = 32  # up to so many the plan says whether the weight is rounded; above, it is

TOKENS = [0, 1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 96, 97, 200, 512, 513]
SHAPES = [(1, 2), (16, 64), (17, 66), (48, 34), (100, 200), (264, 1032), (1000, 512)]
# By the strips that a multiprocessor has: up to 4, 8 and 16, and two tiles for some blocks.
LARGE = [(6144, 1024), (12288, 512), (28672, 384), (40016, 128), (1024, 4096)]
NIBBLES = make_form("int4", 128, torch.bfloat16)
# Scales of x's dtype, as two numbers of it, as float32; powers of two; groups of whole rows and of
# less than 64.
WGMMA_FORMS = [
    NIBBLES,
    make_form("int4", 32, torch.float16, zeros=True),
    make_form("mxfp4", 32, torch.uint8),
    make_form("int8", 0, torch.float32),
]


@pytest.fixture(autouse=True)
def _on_gpu(request):
    if request.config.getoption("--device") != "cuda":
        pytest.skip("the layout is of Hopper's library")


def pack(weight, dtype):
    return rk.pack_weight(**weight.arguments, dtype=dtype)


def oracle(x, weight, dtype, bias=None, residual=None, rounds=None):
    """float64 of the codes, or of the rounded weight (rounds): where not told, of more than
    EITHER_ROWS rows."""
    value = weight.value
    if rounds is None:
        rounds = x.numel() > EITHER_ROWS * value.shape[1]
    if rounds:
        value = value.float().to(dtype).double()
    result = x.double() @ value.T
    for extra in (bias, residual):
        result = result if extra is None else result + extra.double()
    return result


def nearest(got, tokens, expected):
    """expected(rounds), of a rounded weight or not; the nearer one where either may have run."""
    if not EXACT_ROWS < tokens <= EITHER_ROWS:
        return expected(tokens > EITHER_ROWS)
    return min(
        (expected(False), expected(True)),
        key=lambda one: (got.double().cpu() - one.cpu()).norm().item(),
    )


def nearest_oracle(got, x, weight):
    return nearest(got, x.shape[0], lambda rounds: oracle(x, weight, x.dtype, rounds=rounds))


def tolerance_of(tokens, dtype):
    return (ROUNDED if tokens <= _choices.QUANTIZED_ROWS else COMPOSED)[dtype]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_pack_and_unpack_keep_every_bit(form, rng):
    sizes = [*SHAPES, (130, 1000), (65, 4096)]
    if form.kind == "int8":
        sizes += [(33, 101), (1, 1)]
    for n, k in sizes:
        weight = random_weight(form, n, k, rng)
        packed = pack(weight, torch.bfloat16)
        assert packed.layout == "fragments64"
        assert (packed.shape, packed.kind, packed.group) == ((n, k), form.kind, form.group)
        codes, scales, zeros = (None if x is None else x.cpu() for x in rk.unpack_weight(packed))
        assert torch.equal(codes, weight.arguments["w"])
        assert scales.dtype == form.scales
        assert torch.equal(scales.view(torch.uint8), weight.arguments["scales"].view(torch.uint8))
        if form.zeros:
            assert torch.equal(zeros, weight.arguments["zeros"])
        else:
            assert zeros is None


def test_an_odd_number_of_inputs_leaves_no_code_behind(rng):
    """Two inputs share a byte: K is even as w has it. What lies in padding is multiplied by 0."""
    weight = random_weight(NIBBLES, 20, 70, rng)
    packed = pack(weight, torch.bfloat16)
    x = spread((3, 70), torch.bfloat16, rng, gap=58)
    assert_close("linear int4", rk.linear(x, packed), oracle(x, weight, x.dtype), ROUNDED[x.dtype])


def test_bytes_in_memory(rng):
    def bits(form, n=256, k=4096):
        return pack(random_weight(form, n, k, rng), torch.bfloat16).nbytes * 8 / (n * k)

    assert bits(NIBBLES) == 4 + 16 / 128
    assert bits(make_form("int4", 32, torch.float32, zeros=True)) == 4 + 40 / 32
    assert bits(make_form("int8", 128, torch.float16)) == 8 + 16 / 128
    assert bits(make_form("mxfp4", 32, torch.uint8)) == 4.25


def test_order_of_the_codes(rng):
    """As docs/kernels/quantized.md draws it."""
    n = 128
    k = 192
    weight = random_weight(NIBBLES, n, k, rng)
    words = pack(weight, torch.bfloat16).data.cpu()[: n * k // 2].view(torch.int32).tolist()
    codes = (weight.codes + 8).long().tolist()
    wide = random_weight(make_form("int8", 128, torch.bfloat16), n, k, rng)
    wide_words = pack(wide, torch.bfloat16).data.cpu()[: n * k].view(torch.int32).tolist()
    wide_codes = wide.codes.long().tolist()
    for row, column in ((0, 0), (9, 1), (70, 65), (127, 191), (33, 100), (24, 62), (5, 129)):
        tile = row // 64 * (k // 64) + column // 64
        strip = row % 64 // 16
        lane = row % 8 * 4 + column % 8 // 2
        step = column % 64 // 16
        register = row % 16 // 8 + column % 16 // 8 * 2
        word = words[((tile * 4 + strip) * 32 + lane) * 4 + step]
        nibble = register + column % 2 * 4
        assert word >> 4 * nibble & 15 == codes[row][column]
        at = ((tile * 4 + strip) * 2 + step // 2) * 32 + lane
        word = wide_words[at * 4 + step % 2 * 2 + register // 2]
        byte = register % 2 + column % 2 * 2
        assert word >> 8 * byte & 255 == wide_codes[row][column] & 255


@pytest.mark.combinations(
    ends=["nothing", "bias", "float bias", "residual", "all"],
    tokens=TOKENS,
    shape=SHAPES,
    form=FORMS,
    dtype=HALVES,
)
def test_linear_with_its_ends(dtype, form, shape, tokens, ends, rng):
    n, k = shape
    weight = random_weight(form, n, k, rng)
    packed = pack(weight, dtype)
    x = spread((tokens, k), dtype, rng, gap=8)
    bias = None
    if ends in ("bias", "float bias", "all"):
        bias = spread((n,), torch.float32 if ends == "float bias" else dtype, rng)
    residual = spread((tokens, n), dtype, rng, gap=3) if ends in ("residual", "all") else None
    out = guarded((tokens, n), dtype, gap=8)
    assert rk.linear(x, packed, bias, residual=residual, out=out.view) is out.view
    out.check()
    expected = nearest(
        out.view, tokens, lambda rounds: oracle(x, weight, dtype, bias, residual, rounds)
    )
    assert_close(f"linear {form.kind}", out.view, expected, tolerance_of(tokens, dtype))


@pytest.mark.combinations(tokens=TOKENS, shape=SHAPES, form=FORMS, dtype=HALVES)
def test_linear_with_a_float32_result(dtype, form, shape, tokens, rng):
    n, k = shape
    weight = random_weight(form, n, k, rng)
    x = spread((tokens, k), dtype, rng)
    residual = spread((tokens, n), dtype, rng, gap=3)
    out = guarded((tokens, n), torch.float32, gap=8)
    rk.linear(x, pack(weight, dtype), residual=residual, out=out.view)
    out.check()
    expected = nearest(
        out.view, tokens, lambda rounds: oracle(x, weight, dtype, None, residual, rounds)
    )
    assert_close(f"linear {form.kind}", out.view, expected, WIDE)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_linear_of_large_weights(shape, form, rng):
    n, k = shape
    weight = random_weight(form, n, k, rng)
    packed = pack(weight, torch.bfloat16)
    for tokens in (1, 13, 32, 64, 150):
        x = spread((tokens, k), torch.bfloat16, rng)
        got = rk.linear(x, packed)
        allowed = tolerance_of(tokens, x.dtype)
        assert_close("linear", got, nearest_oracle(got, x, weight), allowed)
        assert_same_bits(rk.linear(x, packed), got)


# By how many blocks share k, and whether a block's warpgroups do; a last share that is shorter.
SHARED = [(1024, 4096), (4096, 4096), (2048, 2048), (640, 4160), (6144, 2048), (192, 1032)]


@pytest.mark.parametrize("form", WGMMA_FORMS, ids=str)
@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_blocks_that_share_k(shape, form, rng):
    n, k = shape
    weight = random_weight(form, n, k, rng)
    packed = pack(weight, torch.bfloat16)
    bias = spread((n,), torch.bfloat16, rng)
    for tokens in (33, 64, 65, 128, 190, 512):
        x = spread((tokens, k), torch.bfloat16, rng)
        residual = spread((tokens, n), torch.bfloat16, rng, gap=3)
        out = guarded((tokens, n), torch.bfloat16, gap=8)
        rk.linear(x, packed, bias, residual=residual, out=out.view)
        out.check()
        expected = oracle(x, weight, x.dtype, bias, residual)
        assert_close("linear", out.view, expected, ROUNDED[x.dtype])
        assert_same_bits(rk.linear(x, packed, bias, residual=residual), out.view)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_against_the_codes_themselves(form, dtype, rng):
    """What a caller sees of the weight's rounding."""
    weight = random_weight(form, 1000, 1032, rng)
    packed = pack(weight, dtype)
    for tokens in (32, 33, 64, 200, 512):
        x = spread((tokens, 1032), dtype, rng)
        expected = x.double() @ weight.value.T
        tolerance = (ROUNDED if tokens <= EXACT_ROWS else OF_CODES)[dtype]
        assert_close("linear of codes", rk.linear(x, packed), expected, tolerance)


@pytest.mark.combinations(
    tokens=TOKENS,
    shape=[(32, 64), (96, 130), (512, 256), (12288, 256), (28672, 128), (48, 64)],
    form=FORMS[::3],
    dtype=HALVES,
    interleaved=[False, True],
)
def test_silu_and_mul(dtype, form, shape, tokens, interleaved, rng):
    n, k = shape
    weight = random_weight(form, n, k, rng)
    x = spread((tokens, k), dtype, rng)

    def gated(rounds):
        both = oracle(x, weight, dtype, rounds=rounds)
        gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=1)
        return gate / (1 + torch.exp(-gate)) * up

    out = guarded((tokens, n // 2), dtype, gap=8)
    rk.linear_silu_and_mul(x, pack(weight, dtype), interleaved=interleaved, out=out.view)
    out.check()
    fused = tokens <= _choices.QUANTIZED_ROWS and (interleaved or n % 32 == 0)
    tolerance = (ROUNDED if fused else COMPOSED)[dtype]
    expected = nearest(out.view, tokens, gated)
    assert_close(f"linear_silu_and_mul {form.kind}", out.view, expected, tolerance)


@pytest.mark.parametrize("form", FORMS[::2], ids=str)
def test_other_rows_do_not_change_bits(form, rng):
    for n, k in ((1000, 512), (28672, 192), (12288, 128), (1024, 4096)):
        packed = pack(random_weight(form, n, k, rng), torch.bfloat16)
        x = spread((64, k), torch.bfloat16, rng)
        whole = rk.linear(x, packed)
        for begin, end in ((0, 33), (3, 37), (20, 64), (24, 58)):
            assert_same_bits(rk.linear(x[begin:end], packed), whole[begin:end])
        some = rk.linear(x[:32], packed)
        for begin, end in ((0, 17), (3, 22), (8, 32), (15, 32)):
            assert_same_bits(rk.linear(x[begin:end], packed), some[begin:end])
        few = rk.linear(x[:16], packed)
        for begin, end in ((0, 1), (3, 11), (8, 16), (2, 16)):
            assert_same_bits(rk.linear(x[begin:end], packed), few[begin:end])


# Tiles of 128 and 256 tokens, blocks that share k or the rows of x; k that ends within a stage;
# gates and ups in one tile.
@pytest.mark.parametrize(
    ("rows", "most"), [(65, 128), (100, 128), (129, 512), (200, 512), (300, 512)]
)
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (28672, 192), (1024, 520), (2048, 4096)])
@pytest.mark.parametrize("form", WGMMA_FORMS, ids=str)
def test_batches_of_many_rows_do_not_change_bits(form, n, k, rows, most, rng):
    """A row's bits are those of the largest batch of its class, wherever it stands and whatever
    stands beside it."""
    weight = random_weight(form, n, k, rng)
    packed = pack(weight, torch.bfloat16)
    x = spread((most, k), torch.bfloat16, rng)
    for product in (rk.linear, rk.linear_silu_and_mul):
        whole = product(x, packed)
        for _ in range(3):
            chosen = torch.randperm(most, generator=rng)[:rows]
            assert_same_bits(product(x[chosen], packed), whole[chosen])
        other = spread((rows, k), torch.bfloat16, rng)
        other[-1] = math.nan
        other[3:43] = x[80:120]
        assert_same_bits(product(other, packed)[3:43], whole[80:120])


def test_rows_that_are_not_finite(rng):
    weight = random_weight(NIBBLES, 100, 600, rng)
    packed = pack(weight, torch.bfloat16)
    for tokens in (5, 40, 100):
        x = spread((tokens, 600), torch.bfloat16, rng)
        clean = rk.linear(x, packed)
        for value in (math.nan, math.inf):
            x[2, 450] = value
            out = rk.linear(x, packed)
            assert not torch.isfinite(out[2]).any()
            others = [i for i in range(tokens) if i != 2]
            assert_same_bits(out[others], clean[others])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_embedding(form, dtype, rng):
    weight = random_weight(form, 77, 530, rng)
    packed = pack(weight, dtype)
    ids = integers(0, 77, (40,), rng)
    expected = weight.value.float().to(dtype)
    for index in (ids, ids.int(), ids[::2]):
        out = guarded((len(index), 530), dtype, gap=2)
        rk.embedding(index, packed, out=out.view)
        out.check()
        # A negative zero of e2m1 may be either zero.
        assert_same_bits(out.view + 0.0, expected[index.long()] + 0.0)


def test_embedding_of_no_such_row_is_nan(rng):
    packed = pack(random_weight(NIBBLES, 77, 64, rng), torch.float16)
    out = rk.embedding(torch.tensor([3, 77, -1]), packed)
    assert not out[0].isnan().any() and out[1:].isnan().all()


def test_linear_argmax(rng):
    weight = random_weight(NIBBLES, 1000, 256, rng)
    packed = pack(weight, torch.bfloat16)
    for tokens in (1, 20, 80):
        x = spread((tokens, 256), torch.bfloat16, rng)
        ids, maxima = rk.linear_argmax(x, packed)
        outputs = rk.linear(x, packed, out_dtype=torch.float32)
        assert torch.equal(ids.long(), outputs.argmax(1))
        assert_same_bits(maxima, outputs.amax(1))


def test_x_of_any_alignment_and_rank(rng):
    weight = random_weight(NIBBLES, 100, 130, rng)
    packed = pack(weight, torch.bfloat16)
    holder = spread((6, 140), torch.bfloat16, rng)
    for x in (holder[:, 1:131], holder[1:2, 3:133], holder[:, :130]):
        got = rk.linear(x, packed)
        assert_close("linear", got, oracle(x, weight, x.dtype), ROUNDED[x.dtype])
    deep = spread((2, 3, 130), torch.bfloat16, rng)
    residual = spread((2, 3, 100), torch.bfloat16, rng, gap=3)
    expected = oracle(deep, weight, deep.dtype, None, residual)
    out = guarded((2, 3, 100), torch.bfloat16, gap=5)
    rk.linear(deep, packed, residual=residual, out=out.view)
    out.check()
    assert_close("linear", out.view, expected, ROUNDED[deep.dtype])
    row = rk.linear(deep[0, 0], packed)
    assert_close("linear", row, oracle(deep[0, 0], weight, deep.dtype), ROUNDED[deep.dtype])


def test_residual_in_place(rng):
    weight = random_weight(NIBBLES, 96, 128, rng)
    packed = pack(weight, torch.bfloat16)
    for tokens in (5, 90):
        x = spread((tokens, 128), torch.bfloat16, rng)
        residual = spread((tokens, 96), torch.bfloat16, rng)
        expected = oracle(x, weight, x.dtype, None, residual)
        assert rk.linear(x, packed, residual=residual, out=residual) is residual
        assert_close("linear", residual, expected, tolerance_of(tokens, x.dtype))
