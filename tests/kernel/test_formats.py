"""GPTQ and AWQ as files hold them: words worked out by hand, and each format's definition element
by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import integers
from tests.kernel.packed_values import check_packed, values_of
from tests.kernel.packed_weights import CPU_LIBRARY_ONLY

pytestmark = CPU_LIBRARY_ONLY


def words(rows: list[list[int]]) -> torch.Tensor:
    """int32 of the 32-bit words as they are written in hexadecimal."""
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def random_words(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    return integers(-(2**31), 2**31, shape, rng).to(torch.int32)


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
