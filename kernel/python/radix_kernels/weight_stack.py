"""The weights of many experts in one tensor, as kernels of a GPU read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from . import _arrays, _checks
from ._lazy import torch
from .codes_layout import CODES_LAYOUT, CodeParts, CodesForm, convert
from .packed_weight import FRAGMENT_LAYOUT, PackedWeight, in_codes
from .unpacked_weight import unpack_weight


def stack_codes(op: str, weights: Sequence[PackedWeight]) -> tuple[tuple[PackedWeight, ...], Any]:
    """The same weights in rows of codes, of one form, as rows of one tensor, and the tensor: uint8
    [E, bytes].

    Nothing is copied where they lie so already, one behind the other; else each is written into
    its place, so that beside weights and tensor there is one more at a time. Of different forms are
    those of which some alone have zero points, or whose scales differ in dtype. ValueError for
    weights that cannot be of one form.
    """
    first = weights[0]
    if first.layout == CODES_LAYOUT and all(weight.is_like(first) for weight in weights):
        return in_one(weights)
    form = _joint(op, [weight.form for weight in weights])
    data = torch.zeros((len(weights), form.nbytes), dtype=torch.uint8, device=first.data.device)
    held = []
    for row, weight in zip(data, weights, strict=True):
        convert(_code_parts(weight), row, form)
        held.append(in_codes(row, form))
    return tuple(held), data


def in_one(weights: Sequence[PackedWeight]) -> tuple[tuple[PackedWeight, ...], Any]:
    """Weights of one size as rows of one tensor, and the tensor: their own memory where they follow
    each other in it, or a copy, of which nothing refers to what held them before."""
    data = _rows_of_one(weights)
    if data is not None:
        return tuple(weights), data
    data = torch.stack([_arrays.as_torch(weight.data) for weight in weights])
    held = (replace(weight, data=row) for row, weight in zip(data, weights, strict=True))
    return tuple(held), data


def to_rows_of_codes(weight: PackedWeight) -> PackedWeight:
    """A weight in the order of Hopper's library, in rows of codes; any other is itself."""
    if weight.layout != FRAGMENT_LAYOUT:
        return weight
    form = weight.form
    data = torch.zeros(form.nbytes, dtype=torch.uint8, device=weight.data.device)
    convert(_code_parts(weight), data, form)
    return in_codes(data, form)


def _code_parts(weight: PackedWeight) -> CodeParts:
    """Of a weight in rows of codes or in the order of Hopper's library."""
    if weight.layout != FRAGMENT_LAYOUT:
        return weight.parts
    codes, scales, zeros = unpack_weight(weight)
    return CodeParts(
        codes=codes, scales=scales.T, zeros=None if zeros is None else zeros.T, mins=None
    )


def _rows_of_one(weights: Sequence[PackedWeight]) -> Any:
    """The tensor [E, bytes] of which weights of one size are the rows; None: there is none."""
    first = _arrays.as_torch(weights[0].data)
    size = first.shape[0]
    for index, weight in enumerate(weights):
        data = _arrays.as_torch(weight.data)
        is_next = data.storage_offset() == first.storage_offset() + index * size
        if not is_next or data.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    return first.as_strided((len(weights), size), (size, 1))


def _joint(op: str, forms: Sequence[CodesForm]) -> CodesForm:
    """A form that holds the codes of all."""
    first = forms[0]
    scale_dtype = first.scale_dtype
    for form in forms:
        alike = replace(form, zeros=first.zeros, scale_dtype=first.scale_dtype)
        _checks.require(op, alike == first, f"experts differ in form: {first} and {form}")
        if form.scale_dtype != scale_dtype:
            scale_dtype = "float32"
    return replace(first, zeros=any(form.zeros for form in forms), scale_dtype=scale_dtype)
