"""The weights of many experts in one tensor, as kernels of a GPU read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from . import _arrays, _checks
from ._lazy import torch
from .codes_layout import CodesForm, convert
from .packed_weight import FRAGMENT_LAYOUT, PackedWeight, rows_of_codes
from .unpacked_weight import unpack_weight


def stack_weights(op: str, weights: Sequence[PackedWeight]) -> tuple[tuple[PackedWeight, ...], Any]:
    """The same weights, of one form, as rows of one tensor, and the tensor: uint8 [E, bytes].

    Nothing is copied where they are of one form and lie in one tensor already, one behind the
    other. Of different forms are those of which some alone have zero points, or whose scales differ
    in dtype. ValueError for weights that cannot be of one form.
    """
    if all(weight.is_like(weights[0]) for weight in weights):
        return in_one(weights)
    form = _joint(op, [weight.form for weight in weights])
    size = form.nbytes
    data = torch.zeros((len(weights), size), dtype=torch.uint8, device=weights[0].data.device)
    for row, weight in zip(data, weights, strict=True):
        convert(weight.parts, row, form)
    held = (
        replace(weight, data=row, descriptor=form, zeros=form.zeros, scale_dtype=form.scale_dtype)
        for row, weight in zip(data, weights, strict=True)
    )
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
    codes, scales, zeros = unpack_weight(weight)
    return rows_of_codes(codes, scales, zeros, like=weight)


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
