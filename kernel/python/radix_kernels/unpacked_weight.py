"""What a packed weight was made of."""

from __future__ import annotations

from typing import Any

from . import _arrays, _dispatch
from ._arrays import Array
from .codes_layout import CODES_LAYOUT, unpack
from .packed_weight import REFERENCE_LAYOUT, PackedWeight, row_major
from .weight_kinds import PAIRED_CODES, SUPER_GROUPS, SUPER_INPUTS, code_dtype


def unpack_weight(weight: PackedWeight) -> Any:
    """What was packed, bit for bit, in new arrays: the weight [n, k], or (codes, scales, zeros or
    mins or None); of a weight in super-blocks (codes, scales, mins or None, sub_scales, sub_mins or
    None).

    All are as `pack_weight` takes them; a last 4-bit code of an odd K has 0 beside it.
    """
    if weight.layout == REFERENCE_LAYOUT:
        out = _arrays.empty(weight.data, weight.shape, weight.dtype)
        return _arrays.as_torch(out).copy_(row_major(weight))
    if weight.layout == CODES_LAYOUT:
        return unpack(_arrays.as_torch(weight.data), weight.descriptor)
    run = _dispatch.native("unpack_weight", weight.data)
    if run is None:
        raise ValueError(f"unpack_weight: no library here knows the layout {weight.layout}")
    if weight.kind == "dense":
        out = _arrays.empty(weight.data, weight.shape, weight.dtype)
        run(weight.data, weight.descriptor, out, None, None, None, None, None)
        return out
    n, k = weight.shape
    columns = -(-k // 2) if weight.kind in PAIRED_CODES else k
    codes = _arrays.empty(weight.data, (n, columns), code_dtype(weight.kind))
    groups = -(-k // weight.group) if weight.group else 1
    if weight.kind in SUPER_GROUPS:
        return _unpack_supers(run, weight, codes, groups)
    scales = _arrays.empty(weight.data, (n, groups), weight.scale_dtype)
    zeros = _arrays.empty(weight.data, (n, groups), "uint8") if weight.zeros else None
    mins = _arrays.empty(weight.data, (n, groups), weight.scale_dtype) if weight.mins else None
    run(weight.data, weight.descriptor, codes, scales, zeros, mins, None, None)
    return codes, scales, mins if weight.mins else zeros


def _unpack_supers(run: Any, weight: PackedWeight, codes: Array, groups: int) -> tuple[Any, ...]:
    data = weight.data
    supers = -(-weight.k // SUPER_INPUTS)
    scales = _arrays.empty(data, (weight.n, supers), weight.scale_dtype)
    sub_scales = _arrays.empty(data, (weight.n, groups), "int8")
    mins = None
    sub_mins = None
    if weight.mins:
        mins = _arrays.empty(data, (weight.n, supers), weight.scale_dtype)
        sub_mins = _arrays.empty(data, (weight.n, groups), "uint8")
    run(data, weight.descriptor, codes, scales, None, mins, sub_scales, sub_mins)
    return codes, scales, mins, sub_scales, sub_mins
