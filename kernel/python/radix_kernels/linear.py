"""Dense layers over packed weights, and embedding lookup from the same packed weights.

A packed weight is laid out for one kernel: it is made once at load, is never saved, and never
crosses between backends. Where no native packing exists the layout is `reference`: the bytes of
the row-major weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _arrays, _checks, _dispatch, _loader
from ._arrays import Array

REFERENCE_LAYOUT = "reference"


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k] in the order that its kernel reads.

    data: uint8 [bytes] on the weight's device; layout: the order's name; dtype: name of the
    elements' dtype (`bfloat16`).
    """

    data: Array
    layout: str
    n: int
    k: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k): outputs and inputs, or rows and columns of an embedding."""
        return self.n, self.k

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return int(self.data.shape[0])


def pack_weight(w: Array, scales: Array | None = None, kind: str | None = None) -> PackedWeight:
    """Lay out w for `linear` and `embedding` on its device.

    w: [N, K] bfloat16, float16 or float32, N and K at least 1, last dimension contiguous.
    kind: None or `dense` keeps w's dtype; scales must be None then. The result holds a copy: w
    may be freed afterwards. On a GPU this waits for the copy, so that kernels may count on it.
    Errors: TypeError (dtype), ValueError (shape, stride), NotImplementedError (another kind).
    """
    if kind not in (None, "dense"):
        raise NotImplementedError(f"pack_weight: kind is {kind!r}, only 'dense' exists")
    if scales is not None:
        raise ValueError("pack_weight: scales is given, but a dense weight has none")
    _checks.dtype("pack_weight", "w", w, _checks.FLOATS)
    if len(w.shape) != 2:
        raise ValueError(f"pack_weight: w has {len(w.shape)} dimensions, expected 2")
    n, k = (int(size) for size in w.shape)
    if n < 1 or k < 1:
        raise ValueError(f"pack_weight: w has shape [{n}, {k}], expected at least [1, 1]")
    name = _arrays.dtype_name(w)
    run = _dispatch.native("pack_weight", w)
    if run is None:
        import torch

        rows = _arrays.as_torch(w).clone(memory_format=torch.contiguous_format)
        if rows.is_cuda:
            torch.cuda.current_stream(rows.device).synchronize()
        data = rows.view(-1).view(torch.uint8)
        return PackedWeight(data, REFERENCE_LAYOUT, n, k, name)
    bind: Any = _loader.bind
    data = _aligned_bytes(w, bind.packed_weight_size(n, k, name))
    run(w, data)
    return PackedWeight(data, bind.packed_weight_layout(name), n, k, name)


def unpack_weight(weight: PackedWeight) -> Array:
    """The weight [n, k] again, bit for bit, in a new array."""
    out = _arrays.empty(weight.data, weight.shape, weight.dtype)
    if weight.layout != REFERENCE_LAYOUT:
        run = _dispatch.native("unpack_weight", weight.data)
        if run is None:
            raise ValueError(f"unpack_weight: no library here knows the layout {weight.layout}")
        run(weight.data, out)
        return out
    return _arrays.as_torch(out).copy_(_rows(weight))


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

    x: [..., K] bfloat16, float16 or float32, last dimension contiguous; weight: PackedWeight or
    [N, K] of x's dtype; bias: [N] of x's dtype or float32; residual: out's shape, x's dtype; it may be
    out. out_dtype: a dtype or its name, x's (default) or float32. out: [..., N] of it. Accumulated in
    float32, bias and residual added in float32, rounded once; with a float32 out, as logits should
    be, not at all. With a packed weight on the CPU a row's bits depend on neither the other rows nor the
    number of threads.
    On Hopper up to 64 rows of bfloat16 or float16 run on kernels of our own, where K is a multiple
    of 8 and rows begin at multiples of 16 bytes: a row's bits depend neither on the other rows nor
    on their number within 1 .. 16 and 17 .. 64. With a PackedWeight they fetch its first bytes
    while the kernel ahead still runs. Everything else on GPUs, and an unpacked weight on the CPU,
    is torch's, which promises no such thing: cuBLAS may round partial sums to x's dtype, a residual
    is added to the rounded product, and strides of 2**31 and more are refused (RuntimeError).
    Errors: TypeError (dtype), ValueError (shape, stride).
    """
    op = "linear"
    name = _out_dtype(op, x, out_dtype, out)
    run = small_product(x, weight, out)
    if run is not None:
        if out is None:
            out = _arrays.empty(x, (*x.shape[:-1], int(weight.shape[0])), name)
        return _run_small(run, x, weight, bias, residual, out)
    packed = isinstance(weight, PackedWeight) and weight.layout != REFERENCE_LAYOUT
    if out is None and (packed or not _arrays.is_torch(x)):
        out = _arrays.empty(x, (*tuple(x.shape)[:-1], int(weight.shape[0])), name)
    if packed:
        run = _dispatch.native("linear_packed", x)
        if run is None:
            raise ValueError(f"linear: no library here knows the layout {weight.layout}")
        _same_k_and_dtype(op, x, weight)
        if residual is None:
            run(x, weight.data, weight.n, weight.k, bias, out)
            return out
        _check_residual(op, residual, (*tuple(x.shape)[:-1], weight.n), x)
        wide = _arrays.empty(x, (*tuple(x.shape)[:-1], weight.n), "float32")
        run(x, weight.data, weight.n, weight.k, bias, wide)
        _add_residual(op, wide, residual, out)
        return out
    import torch

    from . import reference

    tx, tb, tr, to = (_arrays.as_torch(t) for t in (x, bias, residual, out))
    tw = _rows(weight) if isinstance(weight, PackedWeight) else _arrays.as_torch(weight)
    _check_linear(op, tx, tw, tb, to)
    if tr is not None:
        _check_residual(op, tr, (*tx.shape[:-1], tw.shape[0]), tx)
    if name == "float32" != _arrays.dtype_name(x) and tx.device.type != "cpu":
        result = _wide_linear(tx, tw, tb, tr)
        return result if to is None else to.copy_(result)
    to_dtype = getattr(torch, name)
    result = reference.linear(tx, tw, tb, residual=tr, out_dtype=to_dtype, out=to, compute_dtype=_accumulator(tx, tb))
    return result if out is None else out


# Rows of x that the kernels for small products take at most.
_SMALL_ROWS = 64


def small_product(x: Array, weight: PackedWeight | Array, out: Array | None) -> _dispatch.Native | None:
    """The kernel for x @ weight.T of few rows, None where another way is right (for `linear` and its kin).

    What is wrong with the arguments is for that other way to say.
    """
    if not _arrays.is_torch(x) or x.device.type != "cuda" or x.ndim < 1:
        return None
    run = _dispatch.native("linear_dense", x)
    if run is None or (isinstance(weight, PackedWeight) and weight.layout != REFERENCE_LAYOUT):
        return None
    rows = x.numel() // max(x.shape[-1], 1)
    if not 1 <= rows <= _SMALL_ROWS or _arrays.dtype_name(x) not in ("bfloat16", "float16"):
        return None
    w = raw_weight(weight)
    if not _arrays.is_torch(w) or w.ndim != 2 or w.dtype != x.dtype or w.shape[1] != x.shape[-1] or w.shape[0] < 1:
        return None
    if out is not None and (not _arrays.is_torch(out) or out.ndim != x.ndim or not (out.ndim == 2 or _dense(out))):
        return None
    return run if _aligned(x.reshape(-1, x.shape[-1])) and _aligned(w) else None


def raw_weight(weight: PackedWeight | Array) -> Any:
    """The row-major [N, K] of a weight whose layout is `reference`."""
    return _rows(weight) if isinstance(weight, PackedWeight) else weight


def _run_small(run: Any, x: Any, weight: Any, bias: Any, residual: Any, out: Any) -> Any:
    flat = residual if residual is None else residual.reshape(-1, residual.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    static = isinstance(weight, PackedWeight)
    run(x, raw_weight(weight), bias, flat, 0, static, out.view(-1, out.shape[-1]) if out.ndim != 2 else out)
    return out


def _aligned(x: Any) -> bool:
    """Rows of 16-byte pieces, as the Hopper kernels read them."""
    steps = 16 // x.element_size()
    whole = x.shape[1] % steps == 0 and (x.shape[0] == 1 or x.stride(0) % steps == 0)
    return whole and x.stride(1) == 1 and x.data_ptr() % 16 == 0


def _dense(x: Any) -> bool:
    return bool(x.is_contiguous())


def embedding(ids: Array, weight: PackedWeight | Array, *, out: Array | None = None) -> Array:
    """`out[t] = weight[ids[t]]`, bits copied.

    ids: int32 or int64 [T]; weight: PackedWeight or [N, K]. out: [T, K] of weight's dtype.
    Errors: TypeError, ValueError (shape; on the CPU also an id outside of 0 .. N - 1).
    """
    op = "embedding"
    packed = isinstance(weight, PackedWeight)
    if out is None:
        name = weight.dtype if packed else _arrays.dtype_name(weight)
        out = _arrays.empty(ids, (*tuple(ids.shape), int(weight.shape[1])), name)
    if packed and weight.layout != REFERENCE_LAYOUT:
        run = _dispatch.native("embedding_packed", ids)
        if run is None:
            raise ValueError(f"embedding: no library here knows the layout {weight.layout}")
        _checks.require(op, _arrays.dtype_name(out) == weight.dtype, "out has another dtype")
        run(ids, weight.data, weight.n, weight.k, out)
        return out
    from . import reference

    ti, to = _arrays.as_torch(ids), _arrays.as_torch(out)
    tw = _rows(weight) if packed else _arrays.as_torch(weight)
    _checks.dtype(op, "ids", ti, _checks.INTS)
    _checks.rank(op, "ids", ti, 1)
    _checks.rank(op, "weight", tw, 2)
    _checks.shape(op, "out", to, (ti.shape[0], tw.shape[1]), "ids and columns of weight")
    _checks.same_dtype(op, "out", to, "weight", tw)
    reference.embedding(ti, tw, out=to)
    return out


def _aligned_bytes(w: Array, size: int) -> Array:
    """uint8 [size] that begins on a cache line, which numpy does not promise."""
    if _arrays.is_torch(w):
        return _arrays.empty(w, (size,), "uint8")
    data = _arrays.empty(w, (size + 63,), "uint8")
    skip = -_arrays.as_torch(data).data_ptr() % 64
    return data[skip : skip + size]


def _rows(weight: PackedWeight) -> Any:
    import torch

    return _arrays.as_torch(weight.data).view(getattr(torch, weight.dtype)).view(weight.shape)


def _accumulator(x: Any, bias: Any) -> Any:
    # On a GPU torch's GEMM accumulates in float32 itself, and adds a bias of its own dtype there;
    # on the CPU the reference widens.
    import torch

    plain = x.device.type != "cpu" and (bias is None or bias.dtype == x.dtype)
    return x.dtype if plain else torch.float32


def _same_k_and_dtype(op: str, x: Array, weight: PackedWeight) -> None:
    if int(x.shape[-1]) != weight.k:
        raise ValueError(f"{op}: x has last dimension {x.shape[-1]}, expected {weight.k} (inputs of weight)")
    if _arrays.dtype_name(x) != weight.dtype:
        raise TypeError(f"{op}: x has dtype {x.dtype}, expected {weight.dtype} (as weight)")


def _add_residual(op: str, wide: Array, residual: Array, out: Array) -> None:
    tw, tr, to = (_arrays.as_torch(t) for t in (wide, residual, out))
    to.copy_(tw + tr)


def _check_residual(op: str, residual: Any, shape: tuple[int, ...], like: Any) -> None:
    _checks.shape(op, "residual", residual, shape, "as out")
    _checks.same_dtype(op, "residual", residual, "x", like)


def _out_dtype(op: str, x: Array, wanted: Any, out: Array | None) -> str:
    """The name of the result's dtype."""
    own = _arrays.dtype_name(x)
    given = own if out is None else _arrays.dtype_name(out)
    name = given if wanted is None else str(wanted).rpartition(".")[2]
    if name not in (own, "float32"):
        raise TypeError(f"{op}: {'out_dtype' if wanted else 'out'} is {name}, expected {own} (as x) or float32")
    if out is not None and given != name:
        raise TypeError(f"{op}: out has dtype {given}, expected {name}")
    return name


def _wide_linear(x: Any, w: Any, bias: Any, residual: Any) -> Any:
    """float32 sums of bfloat16 or float16 operands on a GPU. A torch without such a product widens w piece by piece."""
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
        op, x.shape[-1] == w.shape[1], f"x has last dimension {x.shape[-1]}, expected {w.shape[1]} (inputs of weight)"
    )
    _checks.contiguous_last(op, "x", x)
    if out is not None:
        _checks.shape(op, "out", out, (*x.shape[:-1], w.shape[0]), "rows of x, outputs of weight")
    if bias is not None:
        _checks.shape(op, "bias", bias, (w.shape[0],), "outputs of weight")
        if _arrays.dtype_name(bias) != "float32":
            _checks.same_dtype(op, "bias", bias, "x", x)
