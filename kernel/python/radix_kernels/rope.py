"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and its context extensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _checks, _dispatch
from ._arrays import Array, torch_views
from ._checks.rope import check_rope
from ._lazy import reference, torch


def rope_cos_sin_cache(
    rotary_dim: int,
    max_position: int,
    base: float,
    *,
    scaling: Mapping[str, Any] | None = None,
    dtype: Any = None,
) -> Any:
    """The table that `apply_rope_inplace` reads: a torch CPU tensor [max_position, rotary_dim].

    Columns 0 .. rotary_dim/2 - 1 are cosines, the rest sines; frequency i is
    `base ** (-2i / rotary_dim)`, changed by scaling. Angles are computed in float64 and rounded
    once to dtype (a torch dtype, default float32).

    scaling: a model configuration's `rope_scaling` or `rope_parameters`, whose `rope_type` (or
    `type`) is `default`, `linear` (factor), `llama3` (factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings) or `yarn` (Peng et al., 2023, arXiv:2309.00071: factor,
    original_max_position_embeddings; optional attention_factor, mscale, mscale_all_dim,
    beta_fast, beta_slow, truncate). Yarn's attention factor is folded into the table, so both q
    and k carry it. `rope_theta` and `partial_rotary_factor` in the mapping are the caller's to
    apply (base, rotary_dim). Errors: ValueError (odd rotary_dim, unknown type or key, missing
    key).
    """
    op = "rope_cos_sin_cache"
    _checks.require(
        op,
        rotary_dim > 0 and rotary_dim % 2 == 0,
        f"rotary_dim is {rotary_dim}, expected a positive even number",
    )
    _checks.require(op, max_position >= 0, f"max_position is {max_position}, expected at least 0")
    _checks.require(op, base > 0, f"base is {base}, expected a positive number")
    return reference.rope_cos_sin_cache(
        rotary_dim, max_position, base, scaling=scaling, dtype=dtype or torch.float32
    )


def apply_rope_inplace(
    positions: Array,
    query: Array,
    key: Array | None,
    head_size: int,
    cos_sin_cache: Array,
    *,
    is_neox: bool = True,
) -> None:
    """Rotate the first rotary_dim elements of every head of query and key, in place.

    positions: int32 or int64 [T]. query: [T, Hq * head_size] or [T, Hq, head_size] bfloat16,
    float16 or float32; key: the same with its own number of heads, or None; row and head strides
    are free, the last dimension is contiguous. cos_sin_cache: float32 [max_position, rotary_dim]
    (see `rope_cos_sin_cache`), rotary_dim even and at most head_size; the elements past it stay.
    is_neox: pairs are (i, i + rotary_dim/2); else (2i, 2i + 1).
    Computed in float32, rounded once. Tolerances: docs/numerics.md.

    Errors: TypeError (dtype), ValueError (shape, stride; on the CPU also a position outside of
    0 .. max_position - 1, before anything is written).
    """
    op = "apply_rope_inplace"
    run = _dispatch.native(op, query)
    if run is not None:
        run(positions, query, key, head_size, cos_sin_cache, is_neox)
        return
    positions, query, key, table = torch_views(positions, query, key, cos_sin_cache)
    check_rope(op, positions, query, key, head_size, table)
    reference.apply_rope_inplace(
        positions,
        query,
        key,
        head_size,
        table,
        is_neox=is_neox,
        compute_dtype=reference.float32(),
    )
