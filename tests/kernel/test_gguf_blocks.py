"""GGUF's types as files hold them: bytes worked out by hand, the definition element by element, and
gguf-py's reading of random blocks."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import integers, spread
from tests.kernel.packed_values import check_packed, values_of
from tests.kernel.packed_weights import CPU_LIBRARY_ONLY

pytestmark = CPU_LIBRARY_ONLY


def test_q4_0_by_hand():
    """Scale -0.5; codes 0 .. 15 in the low halves, 15 .. 0 in the high ones."""
    block = bytes.fromhex("00b8 f0e1d2c3b4a5968778695a4b3c2d1e0f")
    found = rk.unpack_gguf(torch.tensor([list(block)], dtype=torch.uint8), "Q4_0")
    assert (found["kind"], found["group"], found["mins"]) == ("int4", 32, None)
    assert bytes(found["w"][0].tolist()) == bytes.fromhex("1032547698badcfe efcdab8967452301")
    assert found["scales"].dtype == torch.float16 and found["scales"].tolist() == [[-0.5]]
    rising = [-0.5 * (code - 8) for code in range(16)]
    assert values_of(found)[0].tolist() == rising + rising[::-1]


def test_q8_0_by_hand():
    """Two blocks with scales 1.5 and 2 ** -24."""
    first = bytes.fromhex("003e 00 01 7f 80 ff") + bytes(27)
    second = bytes.fromhex("0100 02") + bytes(31)
    found = rk.unpack_gguf(torch.tensor([list(first + second)], dtype=torch.uint8), "Q8_0")
    assert (found["kind"], found["group"], found["mins"]) == ("int8", 32, None)
    assert found["w"].tolist() == [[0, 1, 127, -128, -1, *[0] * 27, 2, *[0] * 31]]
    assert found["scales"].tolist() == [[1.5, 2.0**-24]]
    first_values = [0, 1.5, 190.5, -192, -1.5, *[0] * 27]
    second_values = [2.0**-23, *[0] * 31]
    assert values_of(found)[0].tolist() == first_values + second_values


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


def gguf_blocks(quant_type: str, n: int, blocks: int, seed: int) -> np.ndarray:
    """Random codes; scales and minima are small numbers, as random bytes would not be."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant_type]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (n, blocks, size), dtype=np.uint8)
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for place in places.get(quant_type, (0,)):
        numbers = rng.normal(0, 0.01, (n, blocks, 1)).astype("<f2")
        data[..., place : place + 2] = numbers.view(np.uint8)
    return data.reshape(n, blocks * size)


@pytest.mark.parametrize(
    ("quant_type", "kind", "group", "has_mins"),
    [
        ("Q4_0", "int4", 32, False), ("Q4_1", "int4", 32, True), ("Q5_0", "int8", 32, False),
        ("Q5_1", "int8", 32, True), ("Q8_0", "int8", 32, False), ("Q4_K", "int4", 32, True),
        ("Q5_K", "int8", 32, True), ("Q6_K", "int8", 16, False),
    ],
)  # fmt: skip
def test_gguf_types(quant_type, kind, group, has_mins, rng):
    """What gguf-py reads: bit for bit, widened and packed."""
    for n, blocks in ((1, 1), (21, 3)):
        data = gguf_blocks(quant_type, n, blocks, seed=n)
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType[quant_type])
        found = rk.unpack_gguf(data, quant_type)
        assert (found["kind"], found["group"]) == (kind, group)
        assert (found["mins"] is not None) == has_mins
        assert torch.equal(rk.dequantize_gguf(data, quant_type), torch.from_numpy(expected))
        check_packed(found, expected.astype(np.float64), rng)


@pytest.mark.parametrize("quant_type", ["Q4_K", "Q5_K", "Q6_K"])
def test_super_blocks(quant_type):
    """The same elements as gguf-py reads, of scales as the file has them."""
    for n, blocks in ((1, 1), (21, 3)):
        data = gguf_blocks(quant_type, n, blocks, seed=n)
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType[quant_type])
        found = rk.unpack_gguf(data, quant_type, in_super_blocks=True)
        assert found["kind"] == quant_type.lower()
        assert found["scales"].dtype == torch.float16
        assert found["scales"].shape == (n, blocks)
        assert torch.equal(values_of(found), torch.from_numpy(expected))


def test_mxfp4():
    """4-bit floats, whatever the power of two, as gguf-py reads them: the two least powers are
    those of subnormal numbers."""
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, (21, 9, 17), dtype=np.uint8)
    data[..., 0] = rng.choice([0, 1, 2, 3, 100, 127, 140, 252], (21, 9))
    rows = data.reshape(21, -1)
    expected = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType.MXFP4))
    assert torch.equal(rk.dequantize_gguf(rows, "MXFP4"), expected)
    found = rk.unpack_gguf(rows, "MXFP4")
    assert (found["kind"], found["group"], found["mins"]) == ("mxfp4", 32, None)
    assert torch.equal(values_of(found), expected)


def test_other_types_have_no_super_blocks():
    data = gguf_blocks("Q4_1", 5, 2, seed=1)
    flat = rk.unpack_gguf(data, "Q4_1")
    found = rk.unpack_gguf(data, "Q4_1", in_super_blocks=True)
    assert (found["kind"], found["sub_scales"], found["sub_mins"]) == ("int4", None, None)
    assert torch.equal(found["w"], flat["w"])


def test_what_is_not_read():
    blocks = torch.zeros(4, 36, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="'Q3_K', supported are Q4_0, Q4_1, "):
        rk.unpack_gguf(blocks, "Q3_K")
    with pytest.raises(ValueError, match="rows of 36 bytes, expected a multiple of 34"):
        rk.unpack_gguf(blocks, "Q8_0")
    with pytest.raises(ValueError, match="blocks has 1 dim"):
        rk.unpack_gguf(blocks[0], "Q4_0")
    with pytest.raises(TypeError, match="blocks has dtype int8"):
        rk.unpack_gguf(blocks.view(torch.int8), "Q4_0")
