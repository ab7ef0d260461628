"""A weight laid out for one kernel.

It is made once at load, is never saved, and never crosses between backends. Where no native packing
exists the layout is `reference`: the bytes of the row-major weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypedDict, TypeGuard

from . import _arrays, _checks, _dispatch, _loader
from ._arrays import Array
from ._lazy import torch

REFERENCE_LAYOUT = "reference"

# Kinds of weights as the library numbers them.
_KINDS = {
    "dense": 0, "int8": 1, "int4": 2, "w8a8": 3, "w4a8": 4, "q4_k": 5, "q5_k": 6, "q6_k": 7,
    "mxfp4": 8, "fp8": 9,
}  # fmt: skip
_SMALL_CODES = ("int4", "w4a8")
# Kinds in super-blocks of 256 inputs, and the inputs that share a sub-scale.
_SUPER_INPUTS = 256
_SUPER_GROUPS = {"q4_k": 32, "q5_k": 32, "q6_k": 16}
_GROUPS = {**_SUPER_GROUPS, "mxfp4": 32}  # of the kinds that have one size alone
_PAIRED_CODES = (*_SMALL_CODES, "q4_k", "mxfp4")
_FLOAT8 = "float8_e4m3fn"
_BLOCK_OUTPUTS = 128  # that share a scale in FP8 checkpoints


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k] in the order in which its kernel reads it.

    data: uint8 [bytes] on the weight's device; layout: the order's name; dtype: name of the
    elements' dtype (`bfloat16`), for a quantized weight that of x; kind: as `pack_weight` takes it;
    group: inputs that share a scale or sub-scale, 0 for whole rows; scale_dtype: its name; zeros:
    whether 4-bit codes have zero points of their own; mins: whether groups have minima.
    """

    data: Array
    layout: str
    n: int
    k: int
    dtype: str
    kind: str = "dense"
    group: int = 0
    scale_dtype: str = ""
    zeros: bool = False
    mins: bool = False
    descriptor: Any = field(default=None, repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k): outputs and inputs, or rows and columns of an embedding."""
        return self.n, self.k

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return int(self.data.shape[0])

    @property
    def rows(self) -> Any:
        """The same memory as a tensor [n, k] where it is laid out so, as on a GPU; None where it is
        not."""
        return self._rows if self.layout == REFERENCE_LAYOUT else None

    @cached_property
    def _rows(self) -> Any:
        # Of the layout `reference`: the same memory as [n, k]. Kept, for it takes longer to make
        # than a launch.
        return _arrays.as_torch(self.data).view(getattr(torch, self.dtype)).view(self.shape)


def pack_weight(
    w: Array,
    scales: Array | None = None,
    kind: str | None = None,
    *,
    zeros: Array | None = None,
    mins: Array | None = None,
    sub_scales: Array | None = None,
    sub_mins: Array | None = None,
    group: int | None = None,
    dtype: Any = None,
) -> PackedWeight:
    """Lay out w for `linear` and `embedding` on its device. The result holds a copy: w may be
    freed.

    kind: None or `dense` keeps w's dtype; the others are quantized, on the CPU alone:

    - `int8`, `w8a8`: element = code * scale (+ min). w: int8 [N, K].
    - `int4`, `w4a8`: element = (code - zero) * scale, code 0 .. 15. w: uint8 [N, ceil(K / 2)],
      input 2j in the low and 2j + 1 in the high half of byte j. zeros: uint8 [N, G], 0 .. 16; None:
      all are 8. With mins element = code * scale + min, and there are no zeros.
    - `q4_k`, `q5_k`, `q6_k`: element = code * scale * sub_scale (+ min * sub_min), in super-blocks
      of 256 inputs, as GGUF's K types are. w: of `q4_k` as of `int4`; int8 [N, K] of `q5_k`, 0 ..
      31, and `q6_k`, -32 .. 31. scales and mins: [N, ceil(K / 256)]. sub_scales: int8, sub_mins:
      uint8 [N, ceil(K / group)]; the group is 32, of `q6_k` 16.
    - `mxfp4`: element = 4-bit float (e2m1) * power of two, in groups of 32. w as of `int4`, of the
      floats' codes; scales: uint8, the exponent plus 127 (e8m0), 0 .. 252.
    - `fp8`: element = 8-bit float * scale. w: float8_e4m3fn [N, K] without NaN. Scales also [ceil(N
      / 128), G], a row for each 128 outputs, or one number [1] for all: both are repeated.

    `w8a8`, `w4a8` and `mxfp4` quantize x as well, in `linear`: for each row and group, scale =
    max|x| / 127 and code = round(x / scale); their sums are exact integers. So do the kinds in
    super-blocks, for each row and 256 inputs. `int8`, `int4` and `fp8` take x as it is.
    scales (of the first four and `fp8`): bfloat16, float16 or float32 [N, G] with G = ceil(K /
    group), or [N] for whole rows. mins: as scales, of their dtype; None: the groups have none.
    group: 32, 64, 128, for 8 bits also 16, or 0 for whole rows; None: as scales have it, else 0 for
    8 bits and 64 for 4. dtype: of x and of what `embedding` gives, a dtype or its name (default
    bfloat16). `unpack_gptq`, `unpack_awq` and `unpack_gguf` make these arguments of a layer.
    The first four and `fp8` without scales: w is [N, K] bfloat16, float16 or float32 and is
    quantized here, to the nearest; scale of a group: max|w| / 127 (`fp8`: 448), or w / -8 of its
    largest w (4 bits); float32 for whole rows, bfloat16 otherwise; dtype is w's.

    dense: w is [N, K] bfloat16, float16 or float32, N and K at least 1, last dimension contiguous.
    On a GPU this waits for the copy, so that kernels may count on it. Errors: TypeError (dtype),
    ValueError (shape, stride, value), NotImplementedError (another kind, or a quantized one without
    the CPU library).
    """
    op = "pack_weight"
    if kind is None:
        kind = "dense"
    if kind not in _KINDS:
        raise NotImplementedError(f"{op}: kind is {kind!r}, expected one of {', '.join(_KINDS)}")
    if kind != "dense":
        numbers = _Numbers(
            scales=scales, zeros=zeros, mins=mins, sub_scales=sub_scales, sub_mins=sub_mins
        )
        return _pack_quantized(op, w, kind, numbers=numbers, group=group, dtype=dtype)
    others = {
        "scales": scales,
        "zeros": zeros,
        "mins": mins,
        "sub_scales": sub_scales,
        "sub_mins": sub_mins,
        "group": group,
        "dtype": dtype,
    }
    for name, given in others.items():
        if given is not None:
            raise ValueError(f"{op}: {name} is given, but a dense weight has none")
    n, k = _check_matrix(op, w)
    name = _arrays.dtype_name(w)
    run = _dispatch.native(op, w)
    if run is None:
        return PackedWeight(data=_copied_bytes(w), layout=REFERENCE_LAYOUT, n=n, k=k, dtype=name)
    desc = _descriptor(n, k, name, kind=kind, group=0, scale_dtype=name)
    data = _aligned_bytes(w, desc.nbytes)
    run(w, None, None, None, None, None, desc, data)
    return PackedWeight(data=data, layout=desc.layout, n=n, k=k, dtype=name, descriptor=desc)


def _copied_bytes(w: Array) -> Any:
    """The rows of w, one after the other, in memory of their own: uint8 on its device."""
    rows = _arrays.as_torch(w).clone(memory_format=torch.contiguous_format)
    if rows.is_cuda:
        torch.cuda.current_stream(rows.device).synchronize()
    return rows.view(-1).view(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """What codes are multiplied by and counted from, as `pack_weight` takes it."""

    scales: Any
    zeros: Any
    mins: Any
    sub_scales: Any
    sub_mins: Any


def _pack_quantized(
    op: str, w: Any, kind: str, *, numbers: _Numbers, group: int | None, dtype: Any
) -> PackedWeight:
    run = _dispatch.native(op, w) if _arrays.device_type(w) == "cpu" else None
    if run is None:
        raise NotImplementedError(
            f"{op}: {kind} weights need the CPU library and a weight in its memory"
        )
    _check_numbers(op, kind, numbers, dtype)
    zeros = numbers.zeros
    scales = numbers.scales
    mins = numbers.mins
    if scales is None:
        found = _of_floats(op, w, kind, group)
    else:
        scales = _as_columns(scales)
        if kind == "fp8":
            scales = _of_each_output(scales, int(w.shape[0]))
        mins = None if mins is None else _as_columns(mins)
        found = _of_codes(op, w, scales, kind, group=group, dtype=dtype)
    desc = _descriptor(**found, kind=kind, zeros=zeros is not None, mins=mins is not None)
    data = _aligned_bytes(w, desc.nbytes)
    run(w, scales, zeros, mins, numbers.sub_scales, numbers.sub_mins, desc, data)
    return PackedWeight(
        data=data,
        layout=desc.layout,
        kind=kind,
        zeros=zeros is not None,
        mins=mins is not None,
        descriptor=desc,
        **found,
    )


def _check_numbers(op: str, kind: str, numbers: _Numbers, dtype: Any) -> None:
    """Whether a quantized kind is given what belongs together."""
    in_supers = kind in _SUPER_GROUPS
    if numbers.scales is None and kind in _GROUPS:
        raise ValueError(f"{op}: scales is None, but floats cannot be quantized to {kind} here")
    if numbers.scales is None:
        is_alone = numbers.zeros is None and numbers.mins is None and dtype is None
        _checks.require(op, is_alone, "zeros, mins and dtype go with codes and scales")
    for name, given, wanted in (
        ("sub_scales", numbers.sub_scales, in_supers),
        ("sub_mins", numbers.sub_mins, in_supers and numbers.mins is not None),
    ):
        if (given is not None) != wanted:
            found = "None" if given is None else "given"
            expected = "an array" if wanted else "None"
            text = f"{name} is {found}, expected {expected} (kind {kind}, mins beside it or not)"
            raise ValueError(f"{op}: {text}")


class _Description(TypedDict):
    """Fields of a PackedWeight."""

    n: int
    k: int
    dtype: str
    group: int
    scale_dtype: str


def _of_floats(op: str, w: Any, kind: str, group: int | None) -> _Description:
    """Of a weight that is quantized here."""
    n, k = _check_matrix(op, w)
    if group is None:
        group = 64 if kind in _SMALL_CODES else 0
    scale_dtype = "bfloat16" if group else "float32"
    return _Description(n=n, k=k, dtype=_arrays.dtype_name(w), group=group, scale_dtype=scale_dtype)


def _of_codes(
    op: str, w: Any, scales: Any, kind: str, *, group: int | None, dtype: Any
) -> _Description:
    """Of codes with scales [N, G]."""
    paired = kind in _PAIRED_CODES
    _checks.dtype(op, "w", w, (_code_dtype(kind),))
    _checks.require(op, len(w.shape) == 2, f"w has {len(w.shape)} dimensions, expected 2")
    columns = int(w.shape[1])
    k = 2 * columns if paired else columns
    if group is None and kind in _GROUPS:
        group = _GROUPS[kind]
    if group is None:
        group = _group_of(op, k, int(scales.shape[1]), paired)
    return _Description(
        n=int(w.shape[0]),
        k=k,
        dtype="bfloat16" if dtype is None else str(dtype).rpartition(".")[2],
        group=group,
        scale_dtype=_arrays.dtype_name(scales),
    )


def _code_dtype(kind: str) -> str:
    if kind == "fp8":
        return _FLOAT8
    return "uint8" if kind in _PAIRED_CODES else "int8"


def _of_each_output(scales: Any, n: int) -> Any:
    """FP8 scales as [N, G]; as they are where their number of rows makes no sense."""
    rows = int(scales.shape[0])
    if rows == n:
        return scales
    given = _arrays.as_torch(scales)
    if given.numel() == 1:
        return given.expand(n, 1)
    if rows == -(-n // _BLOCK_OUTPUTS):
        return given.repeat_interleave(_BLOCK_OUTPUTS, 0)[:n]
    return scales


def _as_columns(values: Any) -> Any:
    """[N] as [N, 1]."""
    return values[:, None] if len(values.shape) == 1 else values


def _descriptor(
    n: int,
    k: int,
    dtype: str,
    *,
    kind: str,
    group: int,
    scale_dtype: str,
    zeros: bool = False,
    mins: bool = False,
) -> Any:
    """The library's description of a packed weight; the binding takes its fields by position."""
    bind: Any = _loader.bind
    make = bind.PackedDesc
    return make(n, k, dtype, _KINDS[kind], group, scale_dtype, zeros, mins)


def _group_of(op: str, k: int, groups: int, small: bool) -> int:
    """The group size that gives so many groups of K."""
    sizes = [size for size in (32, 64, 128) if -(-k // size) == groups]
    if groups == 1 and not small:
        return 0
    _checks.require(
        op,
        len(sizes) == 1,
        f"scales have {groups} columns for {k} inputs: say which group is meant",
    )
    return sizes[0]


def _check_matrix(op: str, w: Array) -> tuple[int, int]:
    _checks.dtype(op, "w", w, _checks.FLOATS)
    if len(w.shape) != 2:
        raise ValueError(f"{op}: w has {len(w.shape)} dimensions, expected 2")
    n = int(w.shape[0])
    k = int(w.shape[1])
    if n < 1 or k < 1:
        raise ValueError(f"{op}: w has shape [{n}, {k}], expected at least [1, 1]")
    return n, k


def unpack_weight(weight: PackedWeight) -> Any:
    """What was packed, bit for bit, in new arrays: the weight [n, k], or (codes, scales, zeros or
    mins or None); of a weight in super-blocks (codes, scales, mins or None, sub_scales, sub_mins or
    None).

    All are as `pack_weight` takes them; a last 4-bit code of an odd K has 0 beside it.
    """
    if weight.layout == REFERENCE_LAYOUT:
        out = _arrays.empty(weight.data, weight.shape, weight.dtype)
        return _arrays.as_torch(out).copy_(row_major(weight))
    run = _dispatch.native("unpack_weight", weight.data)
    if run is None:
        raise ValueError(f"unpack_weight: no library here knows the layout {weight.layout}")
    if weight.kind == "dense":
        out = _arrays.empty(weight.data, weight.shape, weight.dtype)
        run(weight.data, weight.descriptor, out, None, None, None, None, None)
        return out
    n, k = weight.shape
    columns = -(-k // 2) if weight.kind in _PAIRED_CODES else k
    codes = _arrays.empty(weight.data, (n, columns), _code_dtype(weight.kind))
    groups = -(-k // weight.group) if weight.group else 1
    if weight.kind in _SUPER_GROUPS:
        return _unpack_supers(run, weight, codes, groups)
    scales = _arrays.empty(weight.data, (n, groups), weight.scale_dtype)
    zeros = _arrays.empty(weight.data, (n, groups), "uint8") if weight.zeros else None
    mins = _arrays.empty(weight.data, (n, groups), weight.scale_dtype) if weight.mins else None
    run(weight.data, weight.descriptor, codes, scales, zeros, mins, None, None)
    return codes, scales, mins if weight.mins else zeros


def _unpack_supers(run: Any, weight: PackedWeight, codes: Array, groups: int) -> tuple[Any, ...]:
    data = weight.data
    supers = -(-weight.k // _SUPER_INPUTS)
    scales = _arrays.empty(data, (weight.n, supers), weight.scale_dtype)
    sub_scales = _arrays.empty(data, (weight.n, groups), "int8")
    mins = None
    sub_mins = None
    if weight.mins:
        mins = _arrays.empty(data, (weight.n, supers), weight.scale_dtype)
        sub_mins = _arrays.empty(data, (weight.n, groups), "uint8")
    run(data, weight.descriptor, codes, scales, None, mins, sub_scales, sub_mins)
    return codes, scales, mins, sub_scales, sub_mins


def is_packed(weight: PackedWeight | Array) -> TypeGuard[PackedWeight]:
    """Whether weight is in an order of the native library."""
    return isinstance(weight, PackedWeight) and weight.layout != REFERENCE_LAYOUT


def row_major(weight: PackedWeight | Array) -> Any:
    """The row-major [N, K] of a weight whose layout is `reference`; what is no PackedWeight, as it
    is."""
    if not isinstance(weight, PackedWeight):
        return weight
    return weight._rows


def _aligned_bytes(w: Array, size: int) -> Array:
    """uint8 [size] that begins on a cache line, which numpy does not promise."""
    if _arrays.is_torch(w):
        return _arrays.empty(w, (size,), "uint8")
    data = _arrays.empty(w, (size + 63,), "uint8")
    skip = -_arrays.as_torch(data).data_ptr() % 64  # bytes up to the next cache line
    return data[skip : skip + size]
