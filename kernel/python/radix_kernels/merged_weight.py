"""A weight of several matrices, each packed to its place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from . import _arrays, _dispatch
from ._arrays import Array
from ._lazy import torch
from .codes_layout import CodesForm
from .packed_weight import PackedWeight, aligned_bytes, descriptor, pack_weight
from .weight_form import check_matrix, check_parts, of_floats
from .weight_kinds import KINDS, ONLY_GROUPS

_BLOCK_OUTPUTS = 16  # that the CPU library packs together


def pack_merged(
    parts: Sequence[Array], kind: str | None = None, *, group: int | None = None
) -> PackedWeight:
    """What `pack_weight` makes of matrices of floats, [N1, K], [N2, K] and so on of one dtype and
    device, one under the other. The CPU library packs each to its place, and copies nothing before,
    where all but the last have a multiple of 16 outputs.

    kind, group and errors: as of `pack_weight` without scales; also ValueError where the parts do
    not fit together."""
    op = "pack_merged"
    check_parts(op, parts)
    first = parts[0]
    run = None if _dispatch.is_gpu(first) else _dispatch.native("pack_weight", first)
    is_dense = kind in (None, "dense") and group is None
    is_quantized = kind in KINDS and kind != "dense" and kind not in ONLY_GROUPS
    begin_blocks = all(int(part.shape[0]) % _BLOCK_OUTPUTS == 0 for part in parts[:-1])
    if run is not None and (is_dense or is_quantized) and begin_blocks:
        return _packed_in_place(op, run, parts, kind or "dense", group=group)
    whole = first if len(parts) == 1 else _concatenated(parts)
    return pack_weight(whole, kind=kind, group=group)


def _concatenated(parts: Sequence[Array]) -> Array:
    """By the library that the parts are of, which numpy and CuPy name alike."""
    if _arrays.is_torch(parts[0]):
        return torch.cat(list(parts))
    library: Any = sys.modules[type(parts[0]).__module__.partition(".")[0]]
    return library.concatenate(parts)


def _packed_in_place(
    op: str, run: _dispatch.Native, parts: Sequence[Array], kind: str, *, group: int | None
) -> PackedWeight:
    forms = [_form(op, part, kind, group) for part in parts]
    whole = replace(forms[0], n=sum(form.n for form in forms))
    desc = descriptor(**asdict(whole))
    data = aligned_bytes(parts[0], desc.nbytes)
    begin = 0
    for number, (part, form) in enumerate(zip(parts, forms, strict=True)):
        own = descriptor(**asdict(form))
        try:
            run(part, None, None, None, None, None, own, data[begin : begin + own.nbytes])
        except ValueError as error:
            raise ValueError(f"{op}: part {number}: {error}") from None
        begin += own.nbytes
    fields = asdict(whole)
    if kind == "dense":
        fields["scale_dtype"] = ""
    return PackedWeight(data=data, layout=desc.layout, descriptor=desc, **fields)


def _form(op: str, w: Array, kind: str, group: int | None) -> CodesForm:
    if kind != "dense":
        return CodesForm(**of_floats(op, w, kind, group), kind=kind)
    n, k = check_matrix(op, w)
    name = _arrays.dtype_name(w)
    return CodesForm(n=n, k=k, dtype=name, kind=kind, group=0, scale_dtype=name)
