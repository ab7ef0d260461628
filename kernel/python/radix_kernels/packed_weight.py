"""A weight laid out for one kernel.

It is made once at load, is never saved, and never crosses between backends. Where no native packing
exists the layout is `reference`, the bytes of the row-major weight, or, of a quantized one on a
GPU, `codes` (codes_layout.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeGuard

from . import _arrays, _checks, _dispatch, _loader
from ._arrays import Array
from ._checks.linear import check_code_numbers
from ._lazy import torch
from .codes_layout import CODES_LAYOUT, GROUPS, CodeParts, CodesForm, pack, split, unpack
from .weight_form import as_columns, check_matrix, of_codes, of_each_output, of_floats
from .weight_kinds import KINDS, ONLY_GROUPS, SUPER_GROUPS

REFERENCE_LAYOUT = "reference"
FRAGMENT_LAYOUT = "fragments64"  # of Hopper's library

# What Hopper's library packs: groups, and dtypes of x. All else on a GPU is held in rows of codes.
_HOPPER_GROUPS = (0, 32, 64, 128)
_HOPPER_DTYPES = ("bfloat16", "float16")


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
    def form(self) -> CodesForm:
        """What it consists of, whatever the order."""
        return CodesForm(
            n=self.n,
            k=self.k,
            dtype=self.dtype,
            kind=self.kind,
            group=self.group,
            scale_dtype=self.scale_dtype,
            zeros=self.zeros,
            mins=self.mins,
        )

    @property
    def is_native(self) -> bool:
        """Whether a library has packed it, in an order of its own."""
        return self.layout not in (REFERENCE_LAYOUT, CODES_LAYOUT)

    def is_like(self, other: PackedWeight) -> bool:
        """Whether both consist of the same in the same order: the bytes of one may stand where
        those of the other do."""
        return self.layout == other.layout and self.form == other.form

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
    def parts(self) -> CodeParts:
        """Of the layout `codes`: views of its parts."""
        return split(_arrays.as_torch(self.data), self.descriptor)

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

    kind: None or `dense` keeps w's dtype; the others are quantized. GPUs have `int8`, `int4` and
    `mxfp4`, the CPU all of them:

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

    `w8a8`, `w4a8` and, on the CPU, `mxfp4` quantize x as well, in `linear`: for each row and group,
    scale = max|x| / 127 and code = round(x / scale); their sums are exact integers. So do the kinds
    in super-blocks, for each row and 256 inputs. With AMX and keep_x they leave bfloat16 x as it is
    and round elements to bfloat16, which is nearer to the exact product and, for many rows, faster;
    not `w8a8` in whole rows, nor groups of 64 (4 bits: 128) and more. `Decoder` does so
    for prompts. `int8`, `int4` and `fp8` always take x as it is.
    scales (of the first four and `fp8`): bfloat16, float16 or float32 [N, G] with G = ceil(K /
    group), or [N] for whole rows. mins: as scales, of their dtype; None: the groups have none.
    group: 32, 64, 128, for 8 bits also 16, or 0 for whole rows (of 4 bits on a GPU alone); None: as
    scales have it, else 0 for 8 bits and 64 for 4. dtype: of x and of what `embedding` gives, a
    dtype or its name (default bfloat16). `unpack_gptq`, `unpack_awq` and `unpack_gguf` make these
    arguments of a layer.
    The first four and `fp8` without scales: w is [N, K] bfloat16, float16 or float32 and is
    quantized here, to the nearest; scale of a group: max|w| / 127 (`fp8`: 448), or w / -8 of its
    largest w (4 bits); float32 for whole rows, bfloat16 otherwise; dtype is w's.

    On a Hopper GPU the library has an order of its own for weights without mins, in groups of 32,
    64, 128 or whole rows, for x in 16 bits; what else a GPU takes is held in rows of codes.

    dense: w is [N, K] bfloat16, float16 or float32, N and K at least 1.
    On a GPU this waits for the copy, so that kernels may count on it. Errors: TypeError (dtype),
    ValueError (shape, stride, value), NotImplementedError (another kind, or a quantized one that
    the device has no kernel for).
    """
    op = "pack_weight"
    if kind is None:
        kind = "dense"
    if kind not in KINDS:
        raise NotImplementedError(f"{op}: kind is {kind!r}, expected one of {', '.join(KINDS)}")
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
    n, k = check_matrix(op, w)
    name = _arrays.dtype_name(w)
    run = _dispatch.native(op, w) if _arrays.device_type(w) == "cpu" else None
    if run is None:
        return PackedWeight(data=_copied_bytes(w), layout=REFERENCE_LAYOUT, n=n, k=k, dtype=name)
    desc = descriptor(n, k, name, kind=kind, group=0, scale_dtype=name)
    data = aligned_bytes(w, desc.nbytes)
    run(w, None, None, None, None, None, desc, data)
    return PackedWeight(data=data, layout=desc.layout, n=n, k=k, dtype=name, descriptor=desc)


def _copied_bytes(w: Array) -> Any:
    """The rows of w, one after the other, in memory of their own: uint8 on its device."""
    rows = _arrays.as_torch(w).clone(memory_format=torch.contiguous_format)
    wait(rows)
    return rows.view(-1).view(torch.uint8)


def wait(data: Any) -> None:
    """Until a GPU has written data: kernels that start early count on it."""
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()


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
    if _dispatch.is_gpu(w) and kind not in GROUPS:
        raise NotImplementedError(
            f"{op}: {kind} weights have no kernel on a GPU, which has {', '.join(GROUPS)}"
        )
    _check_numbers(op, kind, numbers, dtype)
    scales = numbers.scales
    mins = numbers.mins
    if scales is None:
        found = of_floats(op, w, kind, group)
    else:
        scales = as_columns(scales)
        if kind == "fp8":
            scales = of_each_output(scales, int(w.shape[0]))
        mins = None if mins is None else as_columns(mins)
        found = of_codes(op, w, scales, kind, group=group, dtype=dtype)
    given = replace(numbers, scales=scales, mins=mins)
    has_zeros = numbers.zeros is not None
    form = CodesForm(**found, kind=kind, zeros=has_zeros, mins=mins is not None)
    run = _packing(op, w, form)
    if run is None:
        return _rows_of_codes(op, w, given, form)
    if scales is None and _dispatch.is_gpu(w):  # the library for GPUs quantizes nothing
        rows = _rows_of_codes(op, w, given, form)
        w, scales, _ = unpack(rows.data, form)
        given = replace(given, scales=scales)
    return _packed_natively(op, run, w, given, form)


def _packing(op: str, w: Any, form: CodesForm) -> _dispatch.Native | None:
    """The library's function that packs w; None on a GPU where it has none for this form, and w
    is held in rows of codes. NotImplementedError where nothing can hold it."""
    run = _dispatch.native(op, w)
    if _dispatch.is_gpu(w):
        is_taken = not form.mins and form.group in _HOPPER_GROUPS and form.dtype in _HOPPER_DTYPES
        return run if is_taken else None
    if run is None:
        raise NotImplementedError(
            f"{op}: {form.kind} weights need the CPU library and a weight in its memory, or a GPU"
        )
    return run


def _packed_natively(
    op: str, run: _dispatch.Native, w: Any, numbers: _Numbers, form: CodesForm
) -> PackedWeight:
    """w in the order of the library for its device."""
    if _dispatch.is_gpu(w):
        check_code_numbers(op, numbers.zeros, numbers.scales)
    fields = asdict(form)
    desc = descriptor(**fields)
    data = aligned_bytes(w, desc.nbytes)
    run(
        w,
        numbers.scales,
        numbers.zeros,
        numbers.mins,
        numbers.sub_scales,
        numbers.sub_mins,
        desc,
        data,
    )
    if desc.layout == FRAGMENT_LAYOUT:
        wait(_arrays.as_torch(data))
    return PackedWeight(data=data, layout=desc.layout, descriptor=desc, **fields)


def in_codes(data: Any, form: CodesForm) -> PackedWeight:
    """The weight of this form whose rows of codes are in data."""
    return PackedWeight(data=data, layout=CODES_LAYOUT, descriptor=form, **asdict(form))


def _rows_of_codes(op: str, w: Any, numbers: _Numbers, form: CodesForm) -> PackedWeight:
    """w as every GPU can read it (codes_layout.py)."""
    parts = CodeParts(codes=None, scales=numbers.scales, zeros=numbers.zeros, mins=numbers.mins)
    return in_codes(pack(op, w, parts, form), form)


def _check_numbers(op: str, kind: str, numbers: _Numbers, dtype: Any) -> None:
    """Whether a quantized kind is given what belongs together."""
    in_supers = kind in SUPER_GROUPS
    if numbers.scales is None and kind in ONLY_GROUPS:
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


def descriptor(
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
    return make(n, k, dtype, KINDS[kind], group, scale_dtype, zeros, mins)


def is_packed(weight: PackedWeight | Array) -> TypeGuard[PackedWeight]:
    """Whether weight is in an order of its own, which is not that of a row-major [N, K]."""
    return isinstance(weight, PackedWeight) and weight.layout != REFERENCE_LAYOUT


def row_major(weight: PackedWeight | Array) -> Any:
    """The row-major [N, K] of a weight whose layout is `reference`; what is no PackedWeight, as it
    is."""
    if not isinstance(weight, PackedWeight):
        return weight
    return weight._rows


def aligned_bytes(w: Array, size: int) -> Array:
    """uint8 [size] that begins at a multiple of 128 bytes, which numpy does not promise."""
    if _arrays.is_torch(w):
        return _arrays.empty(w, (size,), "uint8")
    data = _arrays.empty(w, (size + 127,), "uint8")
    skip = -_arrays.as_torch(data).data_ptr() % 128
    return data[skip : skip + size]
