"""Dense layers over packed and row-major weights, and embedding lookup from the same weights."""

from __future__ import annotations

from typing import Any

from . import _arrays, _checks, _dispatch
from ._arrays import Array, torch_views
from ._checks.linear import check_embedding, read_out_dtype
from ._lazy import reference, torch
from ._products import (
    NO_GATE,
    dense_last,
    hopper_kernel,
    packed_kernel,
    run_hopper,
    run_packed,
    run_torch,
    widened,
)
from .codes_layout import CODES_LAYOUT, values
from .packed_weight import FRAGMENT_LAYOUT, PackedWeight, is_packed, row_major


def linear(
    x: Array,
    weight: PackedWeight | Array,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    keep_x: bool = False,
    out_dtype: Any = None,
    out: Array | None = None,
) -> Array:
    """`out = x @ weight.T + bias + residual`.

    x: [..., K] bfloat16, float16 or float32, last dimension contiguous; weight: PackedWeight or [N,
    K] of x's dtype; bias: [N] of x's dtype or float32; residual: out's shape, x's dtype; it may be
    out; as torch tensors both may have any strides. out_dtype: a dtype or its name, x's (default)
    or float32. out: [..., N] of it; returned. keep_x: kinds that quantize x may leave it as it is,
    see `pack_weight`.

    Accumulated in float32, bias and residual added in float32, rounded once; with a float32 out, as
    logits should be, not at all. The quantized kinds of weight: see `pack_weight`; a NaN or
    infinity in x makes its whole row of outputs not finite. With a packed weight on the CPU a row's
    bits depend on neither the other rows nor the number of threads; in Hopper's kernels neither on
    the other rows nor on their number within 1 .. 16, 17 .. 64, 65 .. 128, 129 .. 192, 193 .. 256
    and above, of a quantized weight within 1 .. 16, 17 .. 32, 33 .. 64, 65 .. 128 and 129 .. 512. A
    quantized weight in the order of Hopper's library meets more than 32 rows, and of some shapes
    more than 16, rounded to x's dtype (one rounding an element; mxfp4 is exact in bfloat16); up to
    that, and in rows of codes, it is exact. torch, which runs the rest (docs/kernels/gemm.md says
    when), promises no such thing and refuses strides of 2**31 and more (RuntimeError). Errors:
    TypeError (dtype), ValueError (shape, stride).
    """
    op = "linear"
    name = read_out_dtype(op, x, out_dtype, out)
    bias = dense_last(bias)
    residual = dense_last(residual)
    weight = widened(op, x, weight)
    if is_packed(weight):
        if out is None:
            out = _empty_out(x, weight, name)
        return run_packed(op, x, weight, bias, residual, keep_x=keep_x, out=out)
    run = hopper_kernel(x, weight, bias, residual, out, wide=name == "float32")
    if run is not None:
        if out is None:
            out = _empty_out(x, weight, name)
        run_hopper(run, x, weight, bias, residual, NO_GATE, out)
        return out
    if out is None and not _arrays.is_torch(x):
        out = _empty_out(x, weight, name)
    return run_torch(op, x, weight, bias, residual, out, name)


def _empty_out(x: Array, weight: PackedWeight | Array, dtype: str) -> Array:
    return _arrays.empty(x, (*tuple(x.shape)[:-1], int(weight.shape[0])), dtype)


def linear_argmax(x: Array, weight: PackedWeight | Array) -> tuple[Array, Array]:
    """The largest output of each row, as a greedy draw over a vocabulary takes it: `linear` without
    its outputs.

    x: [M, K] as in `linear`; weight: as there, at most 2**28 outputs of a packed one. Returns (ids
    int32 [M], maxima float32 [M]): what `top_k_top_p_sampling` draws at temperature 0 from
    `linear(x, weight, out_dtype="float32")`, the lowest id on ties and -1 for a row with a NaN,
    with +inf, or with nothing but -inf; and that output, bit for bit, NaN where the id is -1. With
    a packed weight on the CPU the outputs are written nowhere; elsewhere they are. Errors:
    TypeError (dtype), ValueError (shape, stride).
    """
    op = "linear_argmax"
    _checks.rank(op, "x", x, 2)
    rows = tuple(x.shape[:1])
    ids = _arrays.empty(x, rows, "int32")
    maxima = _arrays.empty(x, rows, "float32")
    if is_packed(weight) and weight.layout not in (CODES_LAYOUT, FRAGMENT_LAYOUT):
        run = packed_kernel(op, op, x, weight)
        run(x, weight.data, weight.descriptor, ids, maxima)
        return ids, maxima
    outputs = _arrays.as_torch(linear(x, weight, out_dtype="float32"))
    found_ids, found_maxima = reference.row_argmax(outputs)
    _arrays.as_torch(ids).copy_(found_ids)
    _arrays.as_torch(maxima).copy_(found_maxima)
    return ids, maxima


def embedding(ids: Array, weight: PackedWeight | Array, *, out: Array | None = None) -> Array:
    """`out[t] = weight[ids[t]]`: bits copied, or (code - zero) * scale of a quantized weight,
    rounded once.

    ids: int32 or int64 [T]; weight: PackedWeight or [N, K]. out: [T, K] of weight's dtype.
    Errors: TypeError, ValueError (shape; on the CPU also an id outside of 0 .. N - 1).
    """
    op = "embedding"
    if out is None:
        name = weight.dtype if isinstance(weight, PackedWeight) else _arrays.dtype_name(weight)
        out = _arrays.empty(ids, (*_arrays.shape(ids), int(weight.shape[1])), name)
    if is_packed(weight) and weight.layout == CODES_LAYOUT:
        given, target = torch_views(ids, out)
        check_embedding(op, given, weight.k, weight.dtype, target)
        found = values(weight.parts, weight.descriptor, given.long())
        target.copy_(found.to(torch.float32))
        return out
    if is_packed(weight):
        run = _dispatch.native("embedding_packed", ids)
        if run is None:
            raise ValueError(f"{op}: no library here knows the layout {weight.layout}")
        _checks.require(op, _arrays.dtype_name(out) == weight.dtype, "out has another dtype")
        run(ids, weight.data, weight.descriptor, out)
        return out
    given, table, target = torch_views(ids, row_major(weight), out)
    _checks.rank(op, "weight", table, 2)
    check_embedding(op, given, table.shape[1], _arrays.dtype_name(table), target)
    reference.embedding(given, table, out=target)
    return out
