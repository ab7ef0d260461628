"""Dense layers over packed weights, and embedding lookup from the same packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _arrays, _checks, _dispatch
from ._arrays import Array
from .packed_weight import PackedWeight, is_packed, row_major


def linear(
    x: Array,
    weight: PackedWeight | Array,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
) -> Array:
    """`out = x @ weight.T + bias + residual`.

    x: [..., K] bfloat16, float16 or float32, last dimension contiguous; weight: PackedWeight or [N,
    K] of x's dtype; bias: [N] of x's dtype or float32; residual: out's shape, x's dtype; it may be
    out; as torch tensors both may have any strides. out_dtype: a dtype or its name, x's (default)
    or float32. out: [..., N] of it. Accumulated in float32, bias and residual added in float32,
    rounded once; with a float32 out, as logits should be, not at all. The quantized kinds: see
    `pack_weight`; a NaN or infinity in x makes its whole row of outputs not finite. With a packed
    weight on the CPU a row's bits depend on neither the other rows nor the number of threads. On
    Hopper up to 64 rows of bfloat16 or float16, and with a residual more, run on kernels of our
    own, where K (of more than 64 rows N too) is a multiple of 8 and rows begin at multiples of 16
    bytes: a row's bits depend neither on the other rows nor on their number within 1 .. 16, 17 ..
    64, 65 .. 128, 129 .. 256 and above. With a PackedWeight they fetch its first bytes while the
    kernel ahead still runs. Above 32 rows with nothing fused, weights of 4 to 96 MiB with at most
    8,192 rows and K below N (of 64 rows K up to 2 N) are cuBLAS's. Everything else on GPUs, and an
    unpacked weight on the CPU, is torch's, which promises no such thing: cuBLAS may round partial
    sums to x's dtype, a residual is added to the rounded product, and strides of 2**31 and more are
    refused (RuntimeError). Errors: TypeError (dtype), ValueError (shape, stride).
    """
    op = "linear"
    name = _out_dtype(op, x, out_dtype, out)
    bias, residual = _dense_last(bias), _dense_last(residual)
    run = fused_product(x, weight, bias, residual, out, wide=name == "float32")
    if run is not None:
        if out is None:
            out = _arrays.empty(x, (*x.shape[:-1], int(weight.shape[0])), name)
        run_fused(run, x, weight, bias, residual, 0, out)
        return out
    packed = is_packed(weight)
    if out is None and (packed or not _arrays.is_torch(x)):
        out = _arrays.empty(x, (*tuple(x.shape)[:-1], int(weight.shape[0])), name)
    if packed:
        return linear_packed(op, x, weight, bias, residual, out=out)
    import torch

    from . import reference

    tx, tb, tr, to = (_arrays.as_torch(t) for t in (x, bias, residual, out))
    tw = _arrays.as_torch(row_major(weight))
    _check_linear(op, tx, tw, tb, to)
    if tr is not None:
        _check_residual(op, tr, (*tx.shape[:-1], tw.shape[0]), tx)
    if name == "float32" != _arrays.dtype_name(x) and tx.device.type != "cpu":
        result = _wide_linear(tx, tw, tb, tr)
        return result if to is None else to.copy_(result)
    to_dtype = getattr(torch, name)
    result = reference.linear(
        tx, tw, tb, residual=tr, out_dtype=to_dtype, out=to, compute_dtype=_accumulator(tx, tb)
    )
    return result if out is None else out


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
    if len(x.shape) != 2:
        raise ValueError(f"{op}: x has {len(x.shape)} dimensions, expected 2")
    ids, maxima = (
        _arrays.empty(x, tuple(x.shape[:1]), "int32"),
        _arrays.empty(x, tuple(x.shape[:1]), "float32"),
    )
    if is_packed(weight):
        run = _native_packed(op, op, x, weight)
        run(x, weight.data, weight.descriptor, ids, maxima)
        return ids, maxima
    from . import reference

    found = reference.row_argmax(_arrays.as_torch(linear(x, weight, out_dtype="float32")))
    for array, result in zip((ids, maxima), found, strict=True):
        _arrays.as_torch(array).copy_(result)
    return ids, maxima


def linear_packed(
    op: str,
    x: Array,
    weight: Any,
    bias: Array | None = None,
    residual: Array | None = None,
    gate: int = 0,
    *,
    out: Array,
) -> Array:
    """The native product for `linear` and its kin; gate: 0 none, 1 halves, 2 interleaved."""
    run = _native_packed(op, "linear_packed", x, weight)
    run(x, weight.data, weight.descriptor, bias, residual, gate, out)
    return out


def _native_packed(op: str, name: str, x: Array, weight: Any) -> _dispatch.Native:
    run = _dispatch.native(name, x)
    if run is None:
        raise ValueError(f"{op}: no library here knows the layout {weight.layout}")
    _same_k_and_dtype(op, x, weight)
    return run


# Up to so many rows of x our kernels are ahead of cuBLAS with nothing fused.
_FEW_ROWS = 64


def _blas_is_ahead(rows: int, n: int, k: int) -> bool:
    """Whether cuBLAS is ahead of ours at so few rows already (docs/kernels/gemm.md): above half of
    them."""
    longest = 2 * n if rows == _FEW_ROWS else n - 1
    return rows > _FEW_ROWS // 2 and k <= longest and n <= 8192 and 4 << 20 <= 2 * n * k < 96 << 20


def fused_product(
    x: Array,
    weight: PackedWeight | Array,
    bias: Array | None = None,
    residual: Array | None = None,
    out: Array | None = None,
    *,
    gated: bool = False,
    wide: bool = False,
) -> _dispatch.Native | None:
    """The kernel of few rows or with something fused, None where another way is right (for `linear`
    and its kin).

    gated: out has half of weight's rows; wide: out is float32. What is wrong with the arguments is
    for that other way to say, so that it is said in the same words of any number of rows.
    """
    if not _arrays.is_torch(x) or x.device.type != "cuda" or x.ndim < 1:
        return None
    run = _dispatch.native("linear_dense", x)
    if run is None or is_packed(weight):
        return None
    rows = x.numel() // max(x.shape[-1], 1)
    many, fused = rows > _FEW_ROWS, gated or (residual is not None and not wide)
    if rows < 1 or (many and not fused) or _arrays.dtype_name(x) not in ("bfloat16", "float16"):
        return None
    w = row_major(weight)
    if (
        not _arrays.is_torch(w)
        or w.ndim != 2
        or w.dtype != x.dtype
        or w.shape[1] != x.shape[-1]
        or w.shape[0] < 1
    ):
        return None
    shape = (*x.shape[:-1], w.shape[0] // (2 if gated else 1))
    if not (_fits(bias, w.shape[:1]) and _fits(residual, shape) and _fits(out, shape)):
        return None
    if not (fused or wide or (bias is not None and bias.dtype != x.dtype)) and _blas_is_ahead(
        rows, *w.shape
    ):
        return None
    if out is not None and not (out.ndim == 2 or _dense(out)):
        return None
    if many and (
        w.shape[0] % 8 or not all(t is None or _aligned(_flat(t)) for t in (residual, out))
    ):
        return None
    return run if _aligned(_flat(x)) and _aligned(w) else None


def run_fused(
    run: _dispatch.Native,
    x: Any,
    weight: PackedWeight | Array,
    bias: Any,
    residual: Any,
    gate: int,
    out: Any,
) -> None:
    """Calls what `fused_product` found; gate as in `linear_packed`."""
    flat = None if residual is None else _flat(residual)
    run(_flat(x), row_major(weight), bias, flat, gate, isinstance(weight, PackedWeight), _flat(out))


def _flat(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


def _fits(x: Any, shape: Sequence[int]) -> bool:
    """Whether x is None, or a tensor of that shape whose last dimension is contiguous."""
    if x is None:
        return True
    return (
        _arrays.is_torch(x)
        and tuple(x.shape) == tuple(shape)
        and (x.stride(-1) == 1 or x.shape[-1] == 1)
    )


def _dense_last(x: Array | None) -> Array | None:
    """x as kernels read it: a torch tensor whose last dimension is not contiguous becomes one where
    it is."""
    if x is None or not _arrays.is_torch(x) or x.ndim == 0 or x.shape[-1] < 2 or x.stride(-1) == 1:
        return x
    return x.contiguous()


def _aligned(x: Any) -> bool:
    """Rows of 16-byte pieces, as the Hopper kernels read them."""
    steps = 16 // x.element_size()
    whole = x.shape[1] % steps == 0 and (x.shape[0] == 1 or x.stride(0) % steps == 0)
    return whole and x.stride(1) == 1 and x.data_ptr() % 16 == 0


def _dense(x: Any) -> bool:
    return bool(x.is_contiguous())


def embedding(ids: Array, weight: PackedWeight | Array, *, out: Array | None = None) -> Array:
    """`out[t] = weight[ids[t]]`: bits copied, or (code - zero) * scale of a quantized weight,
    rounded once.

    ids: int32 or int64 [T]; weight: PackedWeight or [N, K]. out: [T, K] of weight's dtype.
    Errors: TypeError, ValueError (shape; on the CPU also an id outside of 0 .. N - 1).
    """
    op = "embedding"
    if out is None:
        name = weight.dtype if isinstance(weight, PackedWeight) else _arrays.dtype_name(weight)
        out = _arrays.empty(ids, (*tuple(ids.shape), int(weight.shape[1])), name)
    if isinstance(weight, PackedWeight) and is_packed(weight):
        run = _dispatch.native("embedding_packed", ids)
        if run is None:
            raise ValueError(f"embedding: no library here knows the layout {weight.layout}")
        _checks.require(op, _arrays.dtype_name(out) == weight.dtype, "out has another dtype")
        run(ids, weight.data, weight.descriptor, out)
        return out
    from . import reference

    ti, to = _arrays.as_torch(ids), _arrays.as_torch(out)
    tw = _arrays.as_torch(row_major(weight))
    _checks.dtype(op, "ids", ti, _checks.INTS)
    _checks.rank(op, "ids", ti, 1)
    _checks.rank(op, "weight", tw, 2)
    _checks.shape(op, "out", to, (ti.shape[0], tw.shape[1]), "ids and columns of weight")
    _checks.same_dtype(op, "out", to, "weight", tw)
    reference.embedding(ti, tw, out=to)
    return out


def _accumulator(x: Any, bias: Any) -> Any:
    # On a GPU torch's GEMM accumulates in float32 itself, and adds a bias of its own dtype there;
    # on the CPU the reference widens.
    import torch

    plain = x.device.type != "cpu" and (bias is None or bias.dtype == x.dtype)
    return x.dtype if plain else torch.float32


def _same_k_and_dtype(op: str, x: Array, weight: PackedWeight) -> None:
    if int(x.shape[-1]) != weight.k:
        raise ValueError(
            f"{op}: x has last dimension {x.shape[-1]}, expected {weight.k} (inputs of weight)"
        )
    if _arrays.dtype_name(x) != weight.dtype:
        raise TypeError(f"{op}: x has dtype {x.dtype}, expected {weight.dtype} (as weight)")


def _check_residual(op: str, residual: Any, shape: tuple[int, ...], like: Any) -> None:
    _checks.shape(op, "residual", residual, shape, "as out")
    _checks.same_dtype(op, "residual", residual, "x", like)


def _out_dtype(op: str, x: Array, wanted: Any, out: Array | None) -> str:
    """The name of the result's dtype."""
    own = _arrays.dtype_name(x)
    given = own if out is None else _arrays.dtype_name(out)
    name = given if wanted is None else str(wanted).rpartition(".")[2]
    if name not in (own, "float32"):
        raise TypeError(
            f"{op}: {'out_dtype' if wanted else 'out'} is {name}, expected {own} (as x) or float32"
        )
    if out is not None and given != name:
        raise TypeError(f"{op}: out has dtype {given}, expected {name}")
    return name


def _wide_linear(x: Any, w: Any, bias: Any, residual: Any) -> Any:
    """float32 sums of bfloat16 or float16 operands on a GPU. A torch without such a product widens
    w piece by piece."""
    import torch

    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] and torch.version.cuda and hasattr(torch.ops.aten.mm, "dtype"):
        result = torch.mm(flat, w.t(), out_dtype=torch.float32)
    else:
        result = torch.cat([flat.float() @ rows.float().t() for rows in w.split(1 << 14)], dim=1)
    result = result.view(*x.shape[:-1], w.shape[0])
    for term in (bias, residual):
        if term is not None:
            result += term
    return result


def _check_linear(op: str, x: Any, w: Any, bias: Any, out: Any) -> None:
    _checks.dtype(op, "x", x, _checks.FLOATS)
    _checks.rank(op, "weight", w, 2)
    _checks.same_dtype(op, "weight", w, "x", x)
    _checks.require(
        op,
        x.shape[-1] == w.shape[1],
        f"x has last dimension {x.shape[-1]}, expected {w.shape[1]} (inputs of weight)",
    )
    _checks.contiguous_last(op, "x", x)
    if out is not None:
        _checks.shape(op, "out", out, (*x.shape[:-1], w.shape[0]), "rows of x, outputs of weight")
    if bias is not None:
        _checks.shape(op, "bias", bias, (w.shape[0],), "outputs of weight")
        if _arrays.dtype_name(bias) != "float32":
            _checks.same_dtype(op, "bias", bias, "x", x)
