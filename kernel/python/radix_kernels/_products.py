"""What runs a dense product `x @ weight.T`, for `linear` and its kin.

    packed      a weight in the order of the CPU library: its kernels. Bits of a row depend on
                neither the other rows nor the number of threads. A quantized weight in the order of
                Hopper's library: its kernels up to `_choices.QUANTIZED_ROWS` rows, where a row's
                bits depend neither on the other rows nor on their number within 1 .. 16, 17 .. 32,
                33 .. 64, 65 .. 128 and 129 .. 512; of more, the weight is widened to x's dtype and
                goes the ways below
    codes       any other quantized weight on a GPU, in rows of codes: Triton's kernel
    Hopper      on sm_90, 16-bit operands whose rows begin at multiples of 16 bytes, K in multiples
                of 8: up to 64 rows unless cuBLAS is ahead (`_choices.blas_is_ahead`); of more, N in
                multiples of 8, where a residual or a gate is fused unless cuBLAS is ahead with it
                apart (`blas_is_ahead_of_fused`). A row's bits depend neither on the other rows
                nor on their number within 1 .. 16, 17 .. 64, 65 .. 128, 129 .. 192, 193 .. 256
                and above. With a PackedWeight it fetches the first bytes of the weight while the
                preceding kernel still runs
    torch       everything else on a GPU, and an unpacked weight on the CPU. cuBLAS may round
                partial sums to x's dtype

The Hopper way refuses whatever does not fit it, wrong arguments included: torch's way says what is
wrong with them, in the same words for any number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _checks, _choices, _dispatch
from ._arrays import Array, as_torch, dtype_name, is_torch, torch_views
from ._checks import HALVES
from ._checks.linear import check_ends, check_linear, check_packed
from ._lazy import reference, torch
from .codes_layout import CODES_LAYOUT, values
from .packed_weight import FRAGMENT_LAYOUT, PackedWeight, is_packed, row_major

# Epilogues as the library numbers them.
NO_GATE = 0
GATE_HALVES = 1  # gate rows, then up rows
GATE_INTERLEAVED = 2  # gate and up rows in turn

_WIDENED_ROWS = 1 << 14  # of a weight at a time, where torch has no product with wide results


def packed_kernel(op: str, name: str, x: Array, weight: PackedWeight) -> _dispatch.Native:
    """The library's function of that name for x and a packed weight. ValueError, TypeError where
    they do not go together."""
    run = _dispatch.native(name, x)
    if run is None:
        raise ValueError(f"{op}: no library here knows the layout {weight.layout}")
    check_packed(op, x, weight.k, weight.dtype)
    return run


def run_packed(
    op: str,
    x: Array,
    weight: PackedWeight,
    bias: Array | None = None,
    residual: Array | None = None,
    gate: int = NO_GATE,
    *,
    keep_x: bool = False,
    out: Array,
) -> Array:
    """The product with a packed weight; returns out."""
    if weight.layout == CODES_LAYOUT:
        return _run_codes(op, x, weight, bias, residual, gate, out)
    run = packed_kernel(op, "linear_packed", x, weight)
    if weight.layout == FRAGMENT_LAYOUT:
        _run_fragments(op, run, weight, gate, torch_views(x, bias, residual, out))
    else:
        run(x, weight.data, weight.descriptor, bias, residual, gate, out, keep_x)
    return out


def _run_codes(
    op: str,
    x: Array,
    weight: PackedWeight,
    bias: Array | None,
    residual: Array | None,
    gate: int,
    out: Array,
) -> Array:
    given, added, rest, target = torch_views(x, bias, residual, out)
    check_packed(op, given, weight.k, weight.dtype)
    _checks.contiguous_last(op, "x", given)
    n = weight.n if gate == NO_GATE else weight.n // 2
    check_ends(op, given, n, added, rest, target)
    run = _dispatch.native("linear_codes", x)
    if run is None:
        _run_reference(given, weight, added, rest, gate, target)
        return out
    rows = given.numel() // weight.k
    is_matrix = target.is_contiguous() or (target.ndim == 2 and target.stride(1) == 1)
    result = target.reshape(rows, n) if is_matrix else target.new_empty((rows, n))
    flat_residual = None if rest is None else rest.reshape(rows, n)
    run(_flat(given), weight.parts, weight.descriptor, added, flat_residual, gate, result)
    if not is_matrix:
        target.copy_(result.view(target.shape))
    return out


def _run_reference(
    x: Any, weight: PackedWeight, bias: Any, residual: Any, gate: int, out: Any
) -> None:
    """The product with codes by what they stand for."""
    wide = values(weight.parts, weight.descriptor)
    if gate == NO_GATE:
        reference.linear(
            x, wide, bias, residual=residual, out=out, compute_dtype=reference.float32()
        )
        return
    interleaved = gate == GATE_INTERLEAVED
    reference.linear_silu_and_mul(
        x, wide, interleaved=interleaved, out=out, compute_dtype=reference.float32()
    )


def widened(op: str, x: Array, weight: PackedWeight | Array) -> PackedWeight | Array:
    """The weight as the product with x takes it: a quantized one on a GPU that meets more rows than
    its kernel takes becomes row-major [N, K] of x's dtype; any other is itself."""
    if not isinstance(weight, PackedWeight) or weight.layout != FRAGMENT_LAYOUT:
        return weight
    run = packed_kernel(op, "embedding_packed", x, weight)
    given = as_torch(x)
    if given.numel() <= _choices.QUANTIZED_ROWS * weight.k:
        return weight
    rows = _padded(given, weight.n, weight.k)
    run(None, weight.data, weight.descriptor, rows)
    return rows


def _run_fragments(
    op: str, run: _dispatch.Native, weight: PackedWeight, gate: int, tensors: tuple[Any, ...]
) -> None:
    """The product by Hopper's kernel, which takes matrices."""
    x, bias, residual, out = tensors
    shape = (*x.shape[:-1], weight.n if gate == NO_GATE else weight.n // 2)
    _checks.shape(op, "out", out, shape, "rows of x, outputs of weight")
    if residual is not None:
        _checks.shape(op, "residual", residual, shape, "as out")
        residual = _flat(residual)
    is_matrix = out.ndim == 2 or out.is_contiguous()
    result = _flat(out) if is_matrix else out.new_empty((x.numel() // weight.k, shape[-1]))
    run(_aligned_rows(_flat(x)), weight.data, weight.descriptor, bias, residual, gate, result)
    if not is_matrix:
        out.copy_(result.view(out.shape))


def _aligned_rows(x: Any) -> Any:
    """x [M, K], in a copy where rows of it do not begin at multiples of 16 bytes."""
    steps = x.shape[0] < 2 or x.stride(0) % 8 == 0
    is_dense = x.stride(1) == 1 or x.shape[1] == 1
    if not is_dense or (steps and x.data_ptr() % 16 == 0):
        return x  # what is not dense the library refuses
    return _padded(x, *x.shape).copy_(x)


def _padded(x: Any, rows: int, columns: int) -> Any:
    """An uninitialised [rows, columns] like x whose rows begin at multiples of 16 bytes."""
    return x.new_empty((rows, -(-columns // 8) * 8))[:, :columns]


def hopper_kernel(
    x: Array,
    weight: PackedWeight | Array,
    bias: Array | None = None,
    residual: Array | None = None,
    out: Array | None = None,
    *,
    gated: bool = False,
    wide: bool = False,
) -> _dispatch.Native | None:
    """The kernel for `run_hopper`, None where another way is right.

    gated: out has half of weight's rows; wide: out is float32.
    """
    if not is_torch(x) or x.device.type != "cuda" or x.ndim < 1:
        return None
    run = _dispatch.native("linear_dense", x)
    if run is None or is_packed(weight) or dtype_name(x) not in HALVES:
        return None
    w = row_major(weight)
    if not _is_weight_of(w, x):
        return None
    n, k = w.shape
    shape = (*x.shape[:-1], n // 2 if gated else n)
    if not (_fits(bias, (n,)) and _fits(residual, shape) and _fits(out, shape)):
        return None
    if out is not None and out.ndim != 2 and not out.is_contiguous():
        return None
    rows = x.numel() // max(x.shape[-1], 1)
    fused = gated or (residual is not None and not wide)
    if not _has_kernel(rows, n, fused, residual, out):
        return None
    if _blas_is_ahead(rows, n, k, x, bias, gated=gated, fused=fused, wide=wide):
        return None
    return run if _aligned(_flat(x)) and _aligned(w) else None


def run_hopper(
    run: _dispatch.Native,
    x: Any,
    weight: PackedWeight | Array,
    bias: Any,
    residual: Any,
    gate: int,
    out: Any,
) -> None:
    """Calls what `hopper_kernel` found."""
    flat_residual = None if residual is None else _flat(residual)
    static_weight = isinstance(weight, PackedWeight)
    run(_flat(x), row_major(weight), bias, flat_residual, gate, static_weight, _flat(out))


def run_torch(
    op: str,
    x: Array,
    weight: PackedWeight | Array,
    bias: Array | None,
    residual: Array | None,
    out: Array | None,
    name: str,
) -> Array:
    """The product by torch, checked; name: the result's dtype. Returns out, or a new torch
    tensor."""
    given = as_torch(x)
    w = as_torch(row_major(weight))
    bias, residual, target = torch_views(bias, residual, out)
    check_linear(op, given, w, bias, residual, target)
    on_gpu = given.device.type != "cpu"
    if _is_plain_sum(given, bias, residual, name):
        result = _sum_with_residual(given, w, residual, target)
    elif on_gpu and name == "float32" and dtype_name(given) != "float32":
        result = _wide_product(given, w, bias, residual)
        if target is not None:
            target.copy_(result)
    else:
        result = reference.linear(
            given,
            w,
            bias,
            residual=residual,
            out_dtype=getattr(torch, name),
            out=target,
            compute_dtype=_accumulator(given, bias),
        )
    return result if out is None else out


def dense_last(x: Array | None) -> Array | None:
    """x as kernels read it: a torch tensor whose last dimension is not contiguous becomes one where
    it is."""
    if x is None or not is_torch(x) or x.ndim == 0 or x.shape[-1] < 2 or x.stride(-1) == 1:
        return x
    return x.contiguous()


def _has_kernel(rows: int, n: int, fused: bool, residual: Any, out: Any) -> bool:
    """Whether Hopper's library has a kernel for so many rows."""
    if rows < 1:
        return False
    if rows <= _choices.HOPPER_ROWS:
        return True
    aligned = all(tensor is None or _aligned(_flat(tensor)) for tensor in (residual, out))
    return fused and n % 8 == 0 and aligned


def _blas_is_ahead(
    rows: int, n: int, k: int, x: Any, bias: Any, *, gated: bool, fused: bool, wide: bool
) -> bool:
    """Whether torch's way is faster, of those that give the same."""
    if fused:
        return bias is None and _choices.blas_is_ahead_of_fused(rows, n, k, gated=gated)
    has_other_bias = bias is not None and bias.dtype != x.dtype
    return not (wide or has_other_bias) and _choices.blas_is_ahead(rows, n, k)


def _is_weight_of(w: Any, x: Any) -> bool:
    if not is_torch(w) or w.ndim != 2 or w.dtype != x.dtype:
        return False
    return bool(w.shape[1] == x.shape[-1] and w.shape[0] >= 1)


def _fits(x: Any, shape: Sequence[int]) -> bool:
    """Whether x is None, or a tensor of that shape whose last dimension is contiguous."""
    if x is None:
        return True
    if not is_torch(x) or tuple(x.shape) != tuple(shape):
        return False
    return bool(x.stride(-1) == 1 or x.shape[-1] == 1)


def _flat(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


def _aligned(x: Any) -> bool:
    """Rows of 16-byte pieces, as the Hopper kernels read them."""
    steps = 16 // x.element_size()
    whole = x.shape[1] % steps == 0 and (x.shape[0] == 1 or x.stride(0) % steps == 0)
    return bool(whole and x.stride(1) == 1 and x.data_ptr() % 16 == 0)


def _accumulator(x: Any, bias: Any) -> Any:
    """The dtype of torch's operands. On a GPU its product accumulates in float32 by itself, and so
    it adds a bias of its own dtype; elsewhere the operands are widened."""
    by_itself = x.device.type != "cpu" and (bias is None or bias.dtype == x.dtype)
    return x.dtype if by_itself else torch.float32


def _is_plain_sum(x: Any, bias: Any, residual: Any, name: str) -> bool:
    """Whether one call of torch's multiplies, adds a residual and rounds."""
    return (
        residual is not None
        and bias is None
        and dtype_name(x) == name
        and _accumulator(x, bias) == x.dtype
    )


def _sum_with_residual(x: Any, w: Any, residual: Any, out: Any) -> Any:
    """residual + x @ w.T, into out where that is given; residual may be out. The residual is added
    before the sum is rounded, though cuBLAS may round parts of it."""
    if out is not None and out.is_contiguous():
        same_strides = out.stride() == residual.stride()
        if out.data_ptr() != residual.data_ptr() or not same_strides:
            out.copy_(residual)
        _flat(out).addmm_(_flat(x), w.t())
        return out
    result = torch.addmm(_flat(residual), _flat(x), w.t()).view(residual.shape)
    return result if out is None else out.copy_(result)


def _wide_product(x: Any, w: Any, bias: Any, residual: Any) -> Any:
    """float32 sums of bfloat16 or float16 operands on a GPU. A torch without such a product widens
    w piece by piece."""
    flat = _flat(x)
    if flat.shape[0] and torch.version.cuda and hasattr(torch.ops.aten.mm, "dtype"):
        result = torch.mm(flat, w.t(), out_dtype=torch.float32)
    else:
        wide = flat.float()
        pieces = [wide @ rows.float().t() for rows in w.split(_WIDENED_ROWS)]
        result = torch.cat(pieces, dim=1)
    result = result.view(*x.shape[:-1], w.shape[0])
    for term in (bias, residual):
        if term is not None:
            result += term
    return result
