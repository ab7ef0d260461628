"""Matrices of GGUF files, as arguments of `pack_weight` and as floats.

A row is a sequence of blocks, of 32 inputs or, in the K types, of 256. A block holds codes of 4 to
8 bits and what they are multiplied by: a float16 scale, in types `_1` a float16 minimum too, in the
K types small integers for each 16 or 32 inputs, which one or two float16 numbers scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

from . import _arrays, _checks
from ._arrays import Array
from ._lazy import torch


class GgufArguments(TypedDict):
    """Keyword arguments of `pack_weight`; see PackArguments. mins: None where the type has none;
    sub_scales and sub_mins: None where scales are those of groups."""

    w: Array
    scales: Array
    kind: str
    mins: Array | None
    group: int
    sub_scales: Array | None
    sub_mins: Array | None


class _Codes(NamedTuple):
    """element = code * scale + min: codes() gives [N, K] of an 8-bit type; scales and mins (None:
    0) are [N, K / group]. With sub_scales they are [N, K / 256], and what multiplies
    them, sub_scales and sub_mins, is [N, K / group]."""

    codes: Callable[[], Any]
    scales: Any
    mins: Any | None
    group: int
    sub_scales: Any | None = None
    sub_mins: Any | None = None
    powers: Any | None = None  # in place of scales: uint8, the exponent plus 127

    def flat(self) -> _Codes:
        """The same with a scale and minimum for each group: float32, which holds the products
        exactly."""
        if self.sub_scales is None:
            return self
        return self._replace(
            scales=_spread(self.scales, self.sub_scales),
            mins=None if self.mins is None else _spread(self.mins, self.sub_mins),
            sub_scales=None,
            sub_mins=None,
        )


class _Layout(NamedTuple):
    """A type: a block of `inputs` takes `size` bytes. `read` takes blocks [N, B, size]. Of 4-bit
    codes `first` is their first byte, and `run` bytes at a time hold that many inputs in their low
    and as many in their high halves; 0: the codes have more bits."""

    inputs: int
    size: int
    read: Callable[[Any], _Codes]
    first: int = 0
    run: int = 0


def _spread(numbers: Any, small: Any) -> Any:
    """Numbers of super-blocks [N, B] times small integers [N, G], float32 [N, G]."""
    by_super = small.unflatten(1, (numbers.shape[1], -1))
    return (numbers.float()[..., None] * by_super).flatten(1)


def unpack_gguf(blocks: Array, quant_type: str, *, in_super_blocks: bool = False) -> GgufArguments:
    """A matrix [N, K] of a GGUF file, of one of ggml's types Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K,
    Q5_K, Q6_K and MXFP4 (quant_type).

    blocks: uint8 [N, bytes of a row], as gguf-py's reader gives a tensor's data. Codes of 5 and 6
    bits become `int8`. Scales and minima are float16 as the file has them, in the K types float32,
    which holds their products exactly. Groups are of 32 inputs, in Q6_K of 16. in_super_blocks: the
    K types become the kinds `q4_k`, `q5_k` and `q6_k`, which keep scales and minima as the file has
    them, small integers and float16; it says nothing to the others. MXFP4 becomes the kind `mxfp4`.

    Rows stay in the file's order (llama.cpp's converter turns those of Llama's q and k).
    Errors: TypeError (dtype), ValueError (shape), NotImplementedError (another type).
    """
    layout, rows = _blocks("unpack_gguf", blocks, quant_type)
    found = layout.read(rows)
    kind = "int4" if layout.run else "int8"
    if found.powers is not None:
        kind = "mxfp4"
    elif in_super_blocks and found.sub_scales is not None:
        kind = quant_type.lower()
    else:
        found = found.flat()
    return GgufArguments(
        w=_pairs(rows, layout) if layout.run else found.codes().view(torch.int8),
        scales=found.scales if found.powers is None else found.powers,
        kind=kind,
        mins=found.mins,
        group=found.group,
        sub_scales=found.sub_scales,
        sub_mins=found.sub_mins,
    )


def dequantize_gguf(blocks: Array, quant_type: str) -> Any:
    """The elements of a matrix of a GGUF file, float32 [N, K], as gguf-py's `dequantize` rounds
    them; arguments and errors as of `unpack_gguf`."""
    layout, rows = _blocks("dequantize_gguf", blocks, quant_type)
    found = layout.read(rows).flat()
    codes = found.codes().view(len(rows), -1, found.group)
    values = codes.float() * found.scales.float()[..., None]
    if found.mins is not None:
        values += found.mins.float()[..., None]
    return values.flatten(1)


def _pairs(blocks: Any, layout: _Layout) -> Any:
    """The 4-bit codes of blocks [N, B, size] as uint8 [N, K / 2], the even input in the low
    half."""
    codes = blocks[..., layout.first :].clone(memory_format=torch.contiguous_format)
    words = codes.view(torch.int16).unflatten(-1, (-1, layout.run // 2))  # two inputs of each half
    low = words & 0x0F | words >> 4 & 0xF0
    high = words >> 4 & 0x0F | words >> 8 & 0xF0
    return torch.cat((low, high), dim=-1).to(torch.uint8).flatten(1)


def _blocks(op: str, blocks: Array, quant_type: str) -> tuple[_Layout, Any]:
    """The type's layout, and the rows as blocks [N, B, size]."""
    if quant_type not in _LAYOUTS:
        known = ", ".join(_LAYOUTS)
        raise NotImplementedError(f"{op}: quant_type is {quant_type!r}, supported are {known}")
    layout = _LAYOUTS[quant_type]
    _checks.dtype(op, "blocks", blocks, ("uint8",))
    rows = _arrays.as_torch(blocks)
    _checks.rank(op, "blocks", rows, 2)
    size = layout.size
    text = f"blocks has rows of {rows.shape[1]} bytes, expected a multiple of {size} ({quant_type})"
    _checks.require(op, rows.shape[1] % size == 0, text)
    return layout, rows.reshape(rows.shape[0], rows.shape[1] // size, size)


def _halves(block_bytes: Any) -> Any:
    """[N, B, 2] bytes as float16 [N, B], little-endian as they are stored."""
    return block_bytes.clone(memory_format=torch.contiguous_format).view(torch.float16).squeeze(-1)


def _nibbles(packed: Any) -> Any:
    """[..., P] bytes as codes 0 .. 15 [..., 2 P]: first the low halves of all, then the high."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Any, count: int) -> Any:
    """[..., P] bytes as single bits [..., count, P]: bit i of every byte stands in row i."""
    shifts = torch.arange(count, dtype=torch.uint8, device=packed.device)
    return packed[..., None, :] >> shifts[:, None] & 1


def _q4_0(blocks: Any) -> _Codes:
    def codes() -> Any:
        return (_nibbles(blocks[..., 2:]).view(torch.int8) - 8).flatten(1)

    return _Codes(codes=codes, scales=_halves(blocks[..., :2]), mins=None, group=32)


def _q4_1(blocks: Any) -> _Codes:
    def codes() -> Any:
        return _nibbles(blocks[..., 4:]).flatten(1)

    scales = _halves(blocks[..., :2])
    return _Codes(codes=codes, scales=scales, mins=_halves(blocks[..., 2:4]), group=32)


def _fifth_bits(packed: Any) -> Any:
    """[N, B, 4] bytes: bit i is the fifth bit of code i. [N, B, 32], 16 where it is set."""
    return _bits(packed, 8).transpose(-1, -2).flatten(2) << 4


def _q5_0(blocks: Any) -> _Codes:
    def codes() -> Any:
        whole = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
        return (whole.view(torch.int8) - 16).flatten(1)

    return _Codes(codes=codes, scales=_halves(blocks[..., :2]), mins=None, group=32)


def _q5_1(blocks: Any) -> _Codes:
    def codes() -> Any:
        return (_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])).flatten(1)

    scales = _halves(blocks[..., :2])
    return _Codes(codes=codes, scales=scales, mins=_halves(blocks[..., 2:4]), group=32)


def _q8_0(blocks: Any) -> _Codes:
    def codes() -> Any:
        return blocks[..., 2:].flatten(1).view(torch.int8)

    return _Codes(codes=codes, scales=_halves(blocks[..., :2]), mins=None, group=32)


def _sub_scales(blocks: Any) -> tuple[Any, Any]:
    """Small scales and minima of the eight groups of 32 in a block of Q4_K or Q5_K: [N, 8 B].

    Both have 6 bits, packed in 12 bytes: the first four of each fill the low six bits of bytes 0 ..
    3 and 4 .. 7; of the other four, bytes 8 .. 11 hold the low four bits, and the two highest bits
    of bytes 0 .. 7 the rest.
    """
    low_scales, low_mins, others = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((low_scales & 63, others & 15 | low_scales >> 6 << 4), dim=-1)
    mins = torch.cat((low_mins & 63, others >> 4 | low_mins >> 6 << 4), dim=-1)
    return scales.flatten(1).view(torch.int8), mins.flatten(1)


def _in_super_blocks(blocks: Any, codes: Callable[[], Any]) -> _Codes:
    """Of Q4_K and Q5_K, which store what is taken from an element: the negative minimum."""
    scales, mins = _sub_scales(blocks)
    return _Codes(
        codes=codes,
        scales=_halves(blocks[..., :2]),
        mins=-_halves(blocks[..., 2:4]),
        group=32,
        sub_scales=scales,
        sub_mins=mins,
    )


def _q4_k(blocks: Any) -> _Codes:
    def codes() -> Any:
        return _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(1)

    return _in_super_blocks(blocks, codes)


def _q5_k(blocks: Any) -> _Codes:
    def codes() -> Any:
        low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32)))
        runs = low.unflatten(-1, (2, 32)).flatten(2, 3)
        return (runs | _bits(blocks[..., 16:48], 8) << 4).flatten(1)

    return _in_super_blocks(blocks, codes)


def _q6_k(blocks: Any) -> _Codes:
    """Two halves of 128 inputs: 64 bytes of low bits, then 32 bytes of which each has the two high
    bits of four inputs that are 32 apart."""

    def codes() -> Any:
        low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
        packed = blocks[..., 128:192].unflatten(-1, (2, 32))
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
        high = (packed[..., None, :] >> shifts[:, None] & 3).flatten(3)
        return ((low | high << 4).view(torch.int8) - 32).flatten(1)

    small = blocks[..., 192:208].flatten(1).view(torch.int8)
    scales = _halves(blocks[..., 208:])
    return _Codes(codes=codes, scales=scales, mins=None, group=16, sub_scales=small)


# Twice the float of each 4-bit code, which has a bit of sign, two of exponent, one of mantissa.
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _mxfp4(blocks: Any) -> _Codes:
    """Floats of 4 bits; the power of two is that of the float's own value, half of that of twice
    it."""
    powers = blocks[..., 0]

    def codes() -> Any:
        twice = torch.tensor(_TWICE, dtype=torch.int8, device=blocks.device)
        return twice[_nibbles(blocks[..., 1:]).flatten(1).int()]

    one = torch.ones(powers.shape, dtype=torch.float32, device=blocks.device)
    scales = torch.ldexp(one, powers.int() - 128)
    return _Codes(codes=codes, scales=scales, mins=None, group=32, powers=powers.clone())


_LAYOUTS = {
    "Q4_0": _Layout(inputs=32, size=18, read=_q4_0, first=2, run=16),
    "Q4_1": _Layout(inputs=32, size=20, read=_q4_1, first=4, run=16),
    "Q5_0": _Layout(inputs=32, size=22, read=_q5_0),
    "Q5_1": _Layout(inputs=32, size=24, read=_q5_1),
    "Q8_0": _Layout(inputs=32, size=34, read=_q8_0),
    "Q4_K": _Layout(inputs=256, size=144, read=_q4_k, first=16, run=32),
    "Q5_K": _Layout(inputs=256, size=176, read=_q5_k),
    "Q6_K": _Layout(inputs=256, size=210, read=_q6_k),
    "MXFP4": _Layout(inputs=32, size=17, read=_mxfp4, first=1, run=16),
}
