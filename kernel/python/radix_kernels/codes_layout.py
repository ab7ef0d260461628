"""Quantized weights on GPUs as every GPU can read them: codes as they are given, row by row, and in
the same tensor what they are multiplied by and counted from.

    codes    [n, ceil(k / 2)] of 4 bits, [n, k] of 8
    scales   [groups, n], so that neighbours among a tile's outputs are neighbours in memory
    zeros    [groups, n] uint8, where there are any
    mins     [groups, n], where there are any

Each begins at a multiple of 256 bytes, and the whole is a multiple of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from . import _arrays, _checks
from ._checks.linear import check_code_numbers
from ._lazy import reference, torch

CODES_LAYOUT = "codes"
# Kinds of `pack_weight`, and the groups that each may have (0: whole rows).
GROUPS = {"int8": (0, 16, 32, 64, 128), "int4": (0, 32, 64, 128), "mxfp4": (32,)}

_ALIGNMENT = 256
_MIDDLE = 8  # what 4-bit codes without zero points and minima are counted from
_QUANTIZED_ELEMENTS = 1 << 24  # at a time: float32 copies of them are held


class CodeParts(NamedTuple):
    """Views of the parts; None where there are none. A stack of weights has them with one dimension
    more."""

    codes: Any
    scales: Any
    zeros: Any
    mins: Any


@dataclass(frozen=True, kw_only=True)
class CodesForm:
    """What a weight [n, k] of codes consists of; fields as those of `PackedWeight`."""

    n: int
    k: int
    dtype: str
    kind: str
    group: int
    scale_dtype: str
    zeros: bool = False
    mins: bool = False

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return -(-self.k // self.group) if self.group else 1

    @property
    def is_paired(self) -> bool:
        """Whether a byte has two codes."""
        return self.kind != "int8"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's codes."""
        return -(-self.k // 2) if self.is_paired else self.k

    def sections(self) -> list[tuple[str, tuple[int, int], int]]:
        """(dtype, shape, offset in bytes) of codes, scales, zeros and mins; of one that is missing
        the shape is (0, n)."""
        numbers = (self.groups, self.n)
        nothing = (0, self.n)
        shapes = [
            ("uint8" if self.is_paired else "int8", (self.n, self.row_bytes)),
            (self.scale_dtype, numbers),
            ("uint8", numbers if self.zeros else nothing),
            (self.scale_dtype, numbers if self.mins else nothing),
        ]
        found = []
        offset = 0
        for dtype, shape in shapes:
            found.append((dtype, shape, offset))
            size = shape[0] * shape[1] * getattr(torch, dtype).itemsize
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        dtype, shape, offset = self.sections()[-1]
        size = shape[0] * shape[1] * getattr(torch, dtype).itemsize
        return offset + -(-size // _ALIGNMENT) * _ALIGNMENT


class CodeProduct(NamedTuple):
    """The weights of experts, parts with one dimension more, and biases [E, form.n] or None."""

    parts: CodeParts
    form: CodesForm
    bias: Any


def split(data: Any, form: CodesForm) -> CodeParts:
    """The parts of data, uint8 [..., form.nbytes]."""
    views: dict[str, Any] = dict.fromkeys(CodeParts._fields)
    for name, (dtype, shape, offset) in zip(CodeParts._fields, form.sections(), strict=True):
        count = shape[0] * shape[1]
        if count == 0:
            continue
        kind = getattr(torch, dtype)
        flat = data[..., offset : offset + count * kind.itemsize].view(kind)
        views[name] = flat.unflatten(-1, shape)
    return CodeParts(**views)


def pack(op: str, w: Any, given: CodeParts, form: CodesForm) -> Any:
    """The one tensor of codes w with scales [N, G], zeros and mins; without scales w is float and
    quantized here. ValueError for what does not fit the form."""
    source = _arrays.as_torch(w)
    others = given._replace(
        scales=_arrays.as_torch(given.scales),
        zeros=_arrays.as_torch(given.zeros),
        mins=_arrays.as_torch(given.mins),
    )
    _check(op, source, others, form)
    data = torch.zeros(form.nbytes, dtype=torch.uint8, device=source.device)
    parts = split(data, form)
    if others.scales is None:
        _quantize(op, source, parts, form)
    else:
        parts.codes.copy_(source)
        for part, numbers in zip(parts[1:], others[1:], strict=True):
            if numbers is not None:
                part.copy_(numbers.T)
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()
    return data


def unpack(data: Any, form: CodesForm) -> tuple[Any, Any, Any]:
    """(codes, scales, zeros or mins or None) as `pack` was given them, in new tensors."""
    parts = split(data, form)
    added = parts.mins if form.mins else parts.zeros
    more = None if added is None else added.T.contiguous()
    return parts.codes.clone(), parts.scales.T.contiguous(), more


def convert(parts: CodeParts, data: Any, target: CodesForm) -> None:
    """Into data, of another form that has zero points where this one may have none, or scales of a
    wider dtype."""
    new = split(data, target)
    new.codes.copy_(parts.codes)
    new.scales.copy_(parts.scales)
    if new.zeros is not None and parts.zeros is None:
        new.zeros.fill_(_MIDDLE)
    elif new.zeros is not None:
        new.zeros.copy_(parts.zeros)
    if new.mins is not None:
        new.mins.copy_(parts.mins)


def values(parts: CodeParts, form: CodesForm, rows: Any = None) -> Any:
    """The elements of `rows` (an index [R]; None: all) in float64, [R, k]."""
    if rows is not None:
        parts = CodeParts(
            codes=parts.codes[rows],
            scales=parts.scales[:, rows],
            zeros=None if parts.zeros is None else parts.zeros[:, rows],
            mins=None if parts.mins is None else parts.mins[:, rows],
        )
    codes = parts.codes
    if form.is_paired:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)[:, : form.k]
    scales = parts.scales.T
    zeros = None if parts.zeros is None else parts.zeros.T
    if form.kind == "mxfp4":
        codes = _floats_of(codes)
        scales = _powers_of(scales)
    elif form.kind == "int4" and parts.zeros is None and parts.mins is None:
        codes = codes.to(torch.int8) - _MIDDLE
    mins = None if parts.mins is None else parts.mins.T
    return reference.dequantize_weight(codes, scales, zeros, form.group, mins)


def _floats_of(codes: Any) -> Any:
    """What 4-bit float codes (sign, two bits of exponent, one of mantissa) stand for, float32."""
    exponent = (codes >> 1 & 3).int()
    mantissa = (codes & 1).int()
    twice = torch.where(exponent == 0, mantissa, (mantissa + 2) << (exponent - 1).clamp(min=0))
    return torch.where(codes > 7, -twice, twice).float() / 2


def _powers_of(exponents: Any) -> Any:
    """What e8m0 codes below 255 stand for: by their bits, since a power on a GPU may be rounded."""
    bits = exponents.int() << 23
    return torch.where(exponents == 0, 1 << 22, bits).view(torch.float32)


def _quantize(op: str, w: Any, parts: CodeParts, form: CodesForm) -> None:
    """To the nearest codes, some rows at a time."""
    bits = 4 if form.is_paired else 8
    step = max(1, _QUANTIZED_ELEMENTS // form.k)
    for first in range(0, form.n, step):
        rows = w[first : first + step]
        wrong = (~rows.isfinite().all(1)).nonzero()
        if wrong.numel():
            raise ValueError(f"{op}: w has NaN or infinity in row {first + int(wrong[0])}")
        codes, scales = reference.quantize_weight(rows, bits, form.group)
        if form.is_paired:
            codes = torch.nn.functional.pad(codes, (0, form.k % 2))
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        parts.codes[first : first + step].copy_(codes)
        parts.scales[:, first : first + step].copy_(scales.T)


def _check(op: str, w: Any, given: CodeParts, form: CodesForm) -> None:
    sizes = GROUPS[form.kind]
    _checks.require(
        op, form.group in sizes, f"group is {form.group}, expected one of {sizes} ({form.kind})"
    )
    _checks.require(op, form.n > 0 and form.k > 0, f"w has shape {list(w.shape)}, expected rows")
    if given.scales is None:
        return
    numbers = ("uint8",) if form.kind == "mxfp4" else _checks.FLOATS
    expected = (form.n, form.groups)
    _checks.dtype(op, "scales", given.scales, numbers)
    _checks.shape(op, "scales", given.scales, expected, "outputs and groups")
    if form.kind == "mxfp4":
        _checks.require(
            op, given.zeros is None and given.mins is None, "mxfp4 has no zero points or minima"
        )
    _check_offsets(op, given, form)
    check_code_numbers(op, given.zeros, given.scales)


def _check_offsets(op: str, given: CodeParts, form: CodesForm) -> None:
    """Zero points and minima."""
    if given.mins is not None:
        _checks.require(op, given.zeros is None, "zero points or minima, not both")
        _checks.same_dtype(op, "mins", given.mins, "scales", given.scales)
        _checks.shape(op, "mins", given.mins, given.scales.shape, "as scales")
    if given.zeros is None:
        return
    _checks.require(op, form.kind == "int4", f"{form.kind} has no zero points")
    _checks.dtype(op, "zeros", given.zeros, ("uint8",))
    _checks.shape(op, "zeros", given.zeros, given.scales.shape, "as scales")
