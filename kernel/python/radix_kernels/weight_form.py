"""What `pack_weight` finds out about a weight from what it is given: sizes, group, dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from . import _arrays, _checks
from ._arrays import Array
from .weight_kinds import BLOCK_OUTPUTS, ONLY_GROUPS, PAIRED_CODES, SMALL_CODES, code_dtype


class Description(TypedDict):
    """Fields of a PackedWeight."""

    n: int
    k: int
    dtype: str
    group: int
    scale_dtype: str


def of_floats(op: str, w: Any, kind: str, group: int | None) -> Description:
    """Of a weight that is quantized here."""
    n, k = check_matrix(op, w)
    if group is None:
        group = 64 if kind in SMALL_CODES else 0
    scale_dtype = "bfloat16" if group else "float32"
    return Description(n=n, k=k, dtype=_arrays.dtype_name(w), group=group, scale_dtype=scale_dtype)


def of_codes(
    op: str, w: Any, scales: Any, kind: str, *, group: int | None, dtype: Any
) -> Description:
    """Of codes with scales [N, G]."""
    paired = kind in PAIRED_CODES
    _checks.dtype(op, "w", w, (code_dtype(kind),))
    _checks.require(op, len(w.shape) == 2, f"w has {len(w.shape)} dimensions, expected 2")
    columns = int(w.shape[1])
    k = 2 * columns if paired else columns
    if group is None and kind in ONLY_GROUPS:
        group = ONLY_GROUPS[kind]
    if group is None:
        group = _group_of(op, k, int(scales.shape[1]), paired)
    return Description(
        n=int(w.shape[0]),
        k=k,
        dtype="bfloat16" if dtype is None else str(dtype).rpartition(".")[2],
        group=group,
        scale_dtype=_arrays.dtype_name(scales),
    )


def of_each_output(scales: Any, n: int) -> Any:
    """FP8 scales as [N, G]; as they are where their number of rows makes no sense."""
    rows = int(scales.shape[0])
    if rows == n:
        return scales
    given = _arrays.as_torch(scales)
    if given.numel() == 1:
        return given.expand(n, 1)
    if rows == -(-n // BLOCK_OUTPUTS):
        return given.repeat_interleave(BLOCK_OUTPUTS, 0)[:n]
    return scales


def as_columns(values: Any) -> Any:
    """[N] as [N, 1]."""
    return values[:, None] if len(values.shape) == 1 else values


def _group_of(op: str, k: int, groups: int, small: bool) -> int:
    """The group size that gives so many groups of K."""
    sizes = [size for size in (32, 64, 128) if -(-k // size) == groups]
    if groups == 1 and not (small and sizes):
        return 0
    _checks.require(
        op,
        len(sizes) == 1,
        f"scales have {groups} columns for {k} inputs: say which group is meant",
    )
    return sizes[0]


def check_matrix(op: str, w: Array) -> tuple[int, int]:
    """Outputs and inputs of a weight of floats. TypeError, ValueError."""
    _checks.dtype(op, "w", w, _checks.FLOATS)
    if len(w.shape) != 2:
        raise ValueError(f"{op}: w has {len(w.shape)} dimensions, expected 2")
    n = int(w.shape[0])
    k = int(w.shape[1])
    if n < 1 or k < 1:
        raise ValueError(f"{op}: w has shape [{n}, {k}], expected at least [1, 1]")
    return n, k


def check_parts(op: str, parts: Sequence[Array]) -> None:
    """Whether matrices of floats make one, one under the other. TypeError, ValueError."""
    _checks.require(op, len(parts) > 0, "there are no parts, expected at least one")
    _, k = check_matrix(op, parts[0])
    dtype = _arrays.dtype_name(parts[0])
    device = _arrays.device_type(parts[0])
    for number, part in enumerate(parts):
        _, columns = check_matrix(op, part)
        text = f"part {number} has {columns} inputs, expected {k} as part 0"
        _checks.require(op, columns == k, text)
        _checks.dtype(op, f"part {number}", part, (dtype,))
        text = f"part {number} is on {_arrays.device_type(part)}, expected {device} as part 0"
        _checks.require(op, _arrays.device_type(part) == device, text)
