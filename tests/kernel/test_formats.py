"""GPTQ, AWQ and GGUF as files hold them: words and bytes worked out by hand, and each format's
definition element by element."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

import radix_kernels as rk
from radix_kernels import _loader
from tests.kernel.helpers import assert_close, integers, spread

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(
        _loader.backend != "cpu", reason="quantized weights belong to the CPU library"
    ),
]

TOLERANCE = {
    torch.float32: (3e-6, 2e-5),
    torch.float16: (4e-4, 5.5e-4),
    torch.bfloat16: (3e-3, 4.2e-3),
}


def words(rows: list[list[int]]) -> torch.Tensor:
    """int32 of the 32-bit words as they are written in hexadecimal."""
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def random_words(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    return integers(-(2**31), 2**31, shape, rng).to(torch.int32)


def values_of(arguments) -> torch.Tensor:
    """What `embedding` sees of the packed weight: each value, rounded to float32."""
    packed = rk.pack_weight(**arguments, dtype=torch.float32)
    return rk.embedding(torch.arange(packed.n), packed)


def check_packed(arguments, value: np.ndarray, rng: torch.Generator) -> None:
    """The packed weight is value [N, K], exactly, as float32 holds a 16-bit scale times a code;
    `linear` is close."""
    assert torch.equal(values_of(arguments).double(), torch.from_numpy(value))
    for dtype, tolerance in TOLERANCE.items():
        packed = rk.pack_weight(**arguments, dtype=dtype)
        assert packed.shape == value.shape
        for tokens in (1, 5, 40):
            x = spread((tokens, packed.k), dtype, rng)
            expected = x.double() @ torch.from_numpy(value).T
            assert_close(f"linear {packed.kind}", rk.linear(x, packed), expected, tolerance)


# Outputs 0 and 1 by hand, code 8 elsewhere. The first input of a word stands in its lowest four
# bits.
GPTQ_WORDS = [
    [0x76543210, 0x00000001, *[0x88888888] * 6],
    [0xFEDCBA98, 0x80000000, *[0x88888888] * 6],
]
GPTQ_BYTES = [
    [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE],
    [0x01, 0, 0, 0, 0, 0, 0, 0x80],
    *[[0x88] * 8] * 6,
]  # fmt: skip


@pytest.mark.parametrize(
    ("checkpoint_format", "zero_word"),
    [("gptq", 0x77777707), ("gptq_v2", 0x88888818)],
    ids=["v1", "v2"],
)
def test_gptq_by_hand(checkpoint_format, zero_word):
    scales = torch.tensor([[0.5, 2, *[1] * 6]], dtype=torch.float16)
    found = rk.unpack_gptq(
        words(GPTQ_WORDS),
        words([[zero_word]]),
        scales,
        group_size=32,
        checkpoint_format=checkpoint_format,
    )
    assert (found["kind"], found["group"]) == ("int4", 32)
    assert found["w"].dtype == torch.uint8 and found["w"].tolist() == GPTQ_BYTES
    assert found["zeros"].dtype == torch.uint8 and found["zeros"].tolist() == [[8], [1], *[[8]] * 6]
    assert found["scales"].dtype == torch.float16
    assert found["scales"].tolist() == [[0.5], [2], *[[1]] * 6]
    value = values_of(found)
    assert value[0].tolist() == [0.5 * (code - 8) for code in range(16)]
    assert value[1].tolist() == [0, *[-2] * 14, 14]
    assert (value[2:] == 0).all()


def test_gptq_of_8_bits_by_hand():
    """Four inputs a word; codes 0 .. 255 around 128, which version 1 stores as 127."""
    codes = words([[0xFF818000, 0x80808080, 0x80808080, 0x80808080]])
    scales = torch.tensor([[0.25, 1, 1, 1]])
    for checkpoint_format, zero_word in (("gptq", 0x7F7F7F7F), ("gptq_v2", 0x80808080)):
        found = rk.unpack_gptq(
            codes,
            words([[zero_word]]),
            scales,
            group_size=-1,
            bits=8,
            checkpoint_format=checkpoint_format,
        )
        assert (found["kind"], found["group"], found["zeros"]) == ("int8", 0, None)
        assert found["w"].dtype == torch.int8
        assert found["w"].tolist() == [[-128, 0, 1, 127], *[[0] * 4] * 3]
        assert found["scales"].tolist() == [[0.25], [1], [1], [1]]
        assert values_of(found)[0].tolist() == [-32, 0, 0.25, 31.75]


def test_awq_by_hand():
    """Output o has code o for input 0, o + 8 for input 1, and zero point o."""
    scales = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0.5]], dtype=torch.float16)
    found = rk.unpack_awq(
        words([[0x75316420], [0xFDB9ECA8]]), words([[0x75316420]]), scales, group_size=128
    )
    assert (found["kind"], found["group"]) == ("int4", 128)
    assert found["w"].flatten().tolist() == [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]
    assert found["zeros"].flatten().tolist() == list(range(8))
    assert values_of(found).tolist() == [*[[0, 8]] * 7, [0, 4]]


def test_q4_0_by_hand():
    """Scale -0.5; codes 0 .. 15 in the low halves, 15 .. 0 in the high ones."""
    block = bytes.fromhex("00b8 f0e1d2c3b4a5968778695a4b3c2d1e0f")
    found = rk.unpack_gguf(torch.tensor([list(block)], dtype=torch.uint8), "Q4_0")
    assert (found["kind"], found["group"], found["zeros"]) == ("int4", 32, None)
    assert bytes(found["w"][0].tolist()) == bytes.fromhex("1032547698badcfe efcdab8967452301")
    assert found["scales"].dtype == torch.float16 and found["scales"].tolist() == [[-0.5]]
    rising = [-0.5 * (code - 8) for code in range(16)]
    assert values_of(found)[0].tolist() == rising + rising[::-1]


def test_q8_0_by_hand():
    """Two blocks with scales 1.5 and 2 ** -24."""
    first = bytes.fromhex("003e 00 01 7f 80 ff") + bytes(27)
    second = bytes.fromhex("0100 02") + bytes(31)
    found = rk.unpack_gguf(torch.tensor([list(first + second)], dtype=torch.uint8), "Q8_0")
    assert (found["kind"], found["group"], found["zeros"]) == ("int8", 32, None)
    assert found["w"].tolist() == [[0, 1, 127, -128, -1, *[0] * 27, 2, *[0] * 31]]
    assert found["scales"].tolist() == [[1.5, 2.0**-24]]
    first_values = [0, 1.5, 190.5, -192, -1.5, *[0] * 27]
    second_values = [2.0**-23, *[0] * 31]
    assert values_of(found)[0].tolist() == first_values + second_values


def field(
    array: torch.Tensor, row: np.ndarray, column: np.ndarray, bit: np.ndarray, bits: int
) -> np.ndarray:
    """Bits of the words at (row, column), from bit on."""
    return (array.numpy().astype(np.int64)[row, column] >> bit) & (2**bits - 1)


@pytest.mark.parametrize("group_size", [32, 64, 96, 128, 256, 1024, -1])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
def test_gptq(checkpoint_format, group_size, rng):
    """Random words; K is no multiple of the larger groups."""
    n = 24
    k = 8 * 43
    groups = 1 if group_size == -1 else -(-k // group_size)
    qweight = random_words((k // 8, n), rng)
    qzeros = random_words((groups, n // 8), rng)
    first = checkpoint_format == "gptq"
    if first:
        qzeros &= 0x77777777  # 15 is refused
    scales = (torch.rand((groups, n), generator=rng) / 64 + 2**-9).half()
    g_idx = torch.tensor(
        [0 if group_size == -1 else i // group_size for i in range(k)], dtype=torch.int32
    )
    found = rk.unpack_gptq(
        qweight, qzeros, scales, g_idx, group_size=group_size, checkpoint_format=checkpoint_format
    )
    o, i = np.indices((n, k))
    g = g_idx.numpy()[i]
    zero = field(qzeros, g, o // 8, 4 * (o % 8), 4) + first
    value = (field(qweight, i // 8, o, 4 * (i % 8), 4) - zero) * scales.double().numpy()[g, o]
    check_packed(found, value, rng)


@pytest.mark.parametrize("group_size", [32, 128, 384, -1])
def test_gptq_of_8_bits(group_size, rng):
    n = 20
    k = 392
    groups = 1 if group_size == -1 else -(-k // group_size)
    qweight = random_words((k // 4, n), rng)
    qzeros = words([[0x7F7F7F7F] * (n // 4)] * groups)
    scales = (torch.rand((groups, n), generator=rng) / 64 + 2**-9).bfloat16()
    found = rk.unpack_gptq(qweight, qzeros, scales, group_size=group_size, bits=8)
    assert found["group"] == {-1: 0, 384: 128}.get(group_size, group_size)
    o, i = np.indices((n, k))
    g = i * 0 if group_size == -1 else i // group_size
    value = (field(qweight, i // 4, o, 8 * (i % 4), 8) - 128) * scales.double().numpy()[g, o]
    check_packed(found, value, rng)


@pytest.mark.parametrize("group_size", [32, 64, 128, 192, -1])
def test_awq(group_size, rng):
    n = 40
    k = 384
    groups = 1 if group_size == -1 else k // group_size
    qweight = random_words((k, n // 8), rng)
    qzeros = random_words((groups, n // 8), rng)
    scales = (torch.rand((groups, n), generator=rng) / 64 + 2**-9).half()
    found = rk.unpack_awq(qweight, qzeros, scales, group_size=group_size)
    o, i = np.indices((n, k))
    g = i * 0 if group_size == -1 else i // group_size
    place = 4 * np.array([[0, 2, 4, 6, 1, 3, 5, 7].index(output) for output in range(8)])[o % 8]
    code = field(qweight, i, o // 8, place, 4)
    zero = field(qzeros, g, o // 8, place, 4)
    check_packed(found, (code - zero) * scales.double().numpy()[g, o], rng)


def gguf_value(row: bytes, quant_type: str) -> list[float]:
    """A row of blocks, read code by code."""
    size = {"Q8_0": 34, "Q4_0": 18}[quant_type]
    value = []
    for begin in range(0, len(row), size):
        (scale,) = struct.unpack_from("<e", row, begin)
        if quant_type == "Q8_0":
            codes = list(struct.unpack_from("32b", row, begin + 2))
        else:
            data = row[begin + 2 : begin + size]
            codes = [(data[j % 16] >> (4 if j >= 16 else 0) & 15) - 8 for j in range(32)]
        value += [scale * code for code in codes]
    return value


@pytest.mark.parametrize(("quant_type", "size"), [("Q8_0", 34), ("Q4_0", 18)])
def test_gguf_from_a_file(quant_type, size, rng, tmp_path):
    """Random codes, scales of both signs, in a file that is mapped read-only at an odd offset."""
    n = 21
    blocks = 7
    data = integers(0, 256, (n, blocks, size), rng).numpy().astype(np.uint8)
    scales = spread((n, blocks), torch.float16, rng) / 16
    data[..., :2] = scales.numpy().astype("<f2").reshape(n, blocks, 1).view(np.uint8)
    (tmp_path / "blocks").write_bytes(b"#" + data.tobytes())
    mapped = np.memmap(tmp_path / "blocks", np.uint8, "r", offset=1, shape=(n, blocks * size))
    value = np.array([gguf_value(mapped[row].tobytes(), quant_type) for row in range(n)])
    check_packed(rk.unpack_gguf(mapped, quant_type), value, rng)
    # One block alone, of which each slice is contiguous.
    single = rk.unpack_gguf(torch.from_numpy(np.array(mapped))[:1, :size], quant_type)
    assert values_of(single).tolist() == value[:1, :32].tolist()


def test_whatever_the_strides(rng):
    """Columns of a wider array, as a merged or sharded checkpoint gives them, and arrays of
    numpy."""
    qweight = random_words((64, 48), rng)
    qzeros = random_words((64, 6), rng)
    scales = torch.rand((2, 48), generator=rng).half()
    found = rk.unpack_gptq(
        qweight[::2, 8:32], qzeros[:2, 1:4] & 0x77777777, scales[:, 8:32], group_size=128
    )
    alone = rk.unpack_gptq(
        qweight[::2, 8:32].contiguous().numpy(),
        (qzeros[:2, 1:4] & 0x77777777).numpy(),
        scales[:, 8:32].numpy(),
        group_size=128,
    )
    assert torch.equal(values_of(found), values_of(alone))
    found = rk.unpack_awq(qweight[:, 2:4], qzeros[:1, 2:4], scales[:1, 8:24], group_size=64)
    alone = rk.unpack_awq(
        qweight[:, 2:4].contiguous(),
        qzeros[:1, 2:4].contiguous(),
        scales[:1, 8:24].contiguous(),
        group_size=64,
    )
    assert torch.equal(values_of(found), values_of(alone))


def test_zero_points_of_8_are_left_out(rng):
    """A symmetric checkpoint is packed as one without zero points, which has the same values and is
    smaller."""
    qweight = random_words((8, 16), rng)
    scales = torch.ones(2, 16).half()
    symmetric = words([[0x77777777] * 2] * 2)
    other = words([[0x77777777, 0x77777776]] * 2)
    assert rk.unpack_gptq(qweight, symmetric, scales, group_size=32)["zeros"] is None
    assert rk.unpack_gptq(qweight, other, scales, group_size=32)["zeros"] is not None
    zeros = words([[0x88888888] * 2] * 2)
    assert rk.unpack_awq(random_words((64, 2), rng), zeros, scales, group_size=32)["zeros"] is None


# A layer of 64 inputs and 16 outputs in groups of 32, in either format.
SCALES = torch.ones(2, 16).half()
GPTQ = {
    "qweight": torch.zeros(8, 16, dtype=torch.int32),
    "qzeros": words([[0x77777777] * 2] * 2),
    "scales": SCALES,
}
AWQ = {
    "qweight": torch.zeros(64, 2, dtype=torch.int32),
    "qzeros": words([[0x88888888] * 2] * 2),
    "scales": SCALES,
}


def gptq(**change):
    return rk.unpack_gptq(**{**GPTQ, "group_size": 32, **change})


def awq(**change):
    return rk.unpack_awq(**{**AWQ, "group_size": 32, **change})


def test_gptq_in_another_order():
    order = torch.arange(64, dtype=torch.int32) // 32
    assert gptq(g_idx=order)["group"] == gptq(g_idx=order.long())["group"] == 32
    swapped = order.clone()
    swapped[[5, 40]] = swapped[[40, 5]]
    with pytest.raises(NotImplementedError, match="input 5 in group 1, expected 0: .*desc_act"):
        gptq(g_idx=swapped)
    with pytest.raises(NotImplementedError, match="input 32 in group 0, expected 1"):
        gptq(g_idx=order * 0)
    with pytest.raises(ValueError, match="g_idx has shape"):
        gptq(g_idx=order[:63])
    with pytest.raises(TypeError, match="g_idx has dtype"):
        gptq(g_idx=order.float())


def test_gptq_zero_points_that_nothing_can_hold():
    """Version 1 has no zero point of 0, and what is written there no one meaning. 8-bit codes have
    128 alone."""
    with pytest.raises(ValueError, match="15 for group 1 of output 9: .*gptq_v2"):
        gptq(qzeros=words([[0x77777777] * 2, [0x77777777, 0x777777F7]]))
    zeros = gptq(qzeros=words([[0xFFFFFFFF] * 2] * 2), checkpoint_format="gptq_v2")["zeros"]
    assert (zeros == 15).all()
    eight = {"qweight": torch.zeros(16, 16, dtype=torch.int32), "bits": 8}
    for qzeros in (
        words([[0x7F7F7F7F] * 4, [0x7F7F7F7F] * 3 + [0x7F7E7F7F]]),
        words([[0xFFFFFFFF] * 4] * 2),
    ):
        with pytest.raises(NotImplementedError, match="zero points of 8 bits are not all 128"):
            gptq(qzeros=qzeros, **eight)


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize(("call", "arrays"), [(gptq, GPTQ), (awq, AWQ)], ids=["gptq", "awq"])
def test_wrong_arrays(call, arrays, name):
    assert call()["w"].shape == (16, 32)
    given = arrays[name]
    other_dtypes = {"qweight": torch.int64, "qzeros": torch.uint8, "scales": torch.float64}
    with pytest.raises(TypeError, match=f"{name} has dtype"):
        call(**{name: given.to(other_dtypes[name])})
    with pytest.raises(TypeError, match=f"{name} is list"):
        call(**{name: given.tolist()})
    with pytest.raises(ValueError, match=f"{name} has"):
        call(**{name: given.flatten()})
    with pytest.raises(ValueError, match="has shape"):
        call(**{name: given[:1]})
    with pytest.raises(ValueError, match="has shape|outputs"):
        call(**{name: given[:, :-1]})


@pytest.mark.parametrize("call", [gptq, awq])
def test_wrong_groups(call):
    for group_size in (0, -2):
        with pytest.raises(ValueError, match="group_size"):
            call(group_size=group_size)
    with pytest.raises(ValueError, match="has shape .*groups of 64"):
        call(group_size=64)
    with pytest.raises(NotImplementedError, match="group_size is 48"):
        call(group_size=48)


def test_forms_that_are_not_read():
    for bits in (2, 3):
        with pytest.raises(NotImplementedError, match="bits"):
            gptq(bits=bits)
    with pytest.raises(NotImplementedError, match="marlin"):
        gptq(checkpoint_format="marlin")
    odd = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="3 inputs"):
        rk.unpack_awq(odd, odd[:1], torch.ones(1, 8), group_size=-1)
    blocks = torch.zeros(4, 36, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="Q4_K"):
        rk.unpack_gguf(blocks, "Q4_K")
    with pytest.raises(ValueError, match="rows of 36 bytes, expected a multiple of 34"):
        rk.unpack_gguf(blocks, "Q8_0")
    with pytest.raises(ValueError, match="blocks has 1 dim"):
        rk.unpack_gguf(blocks[0], "Q4_0")
    with pytest.raises(TypeError, match="blocks has dtype int8"):
        rk.unpack_gguf(blocks.view(torch.int8), "Q4_0")
