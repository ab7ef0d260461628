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
    may be freed afterwards.
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


def linear(x: Array, weight: PackedWeight | Array, bias: Array | None = None, *, out: Array | None = None) -> Array:
    """`out = x @ weight.T + bias`.

    x: [..., K] bfloat16, float16 or float32, last dimension contiguous; weight: PackedWeight or
    [N, K] of x's dtype; bias: [N] of x's dtype or float32. out: [..., N] of x's dtype.
    Accumulated in float32, bias added in float32, rounded once. With a packed weight on the CPU
    a row's bits depend on neither the other rows nor the number of threads; torch computes an
    unpacked one, and on GPUs, and promises no such thing: cuBLAS may round partial sums to x's
    dtype, and refuses strides of 2**31 and more (RuntimeError).
    Errors: TypeError (dtype), ValueError (shape, stride).
    """
    op = "linear"
    packed = isinstance(weight, PackedWeight) and weight.layout != REFERENCE_LAYOUT
    if out is None and (packed or not _arrays.is_torch(x)):
        out = _arrays.empty(x, (*tuple(x.shape)[:-1], int(weight.shape[0])))
    if packed:
        run = _dispatch.native("linear_packed", x)
        if run is None:
            raise ValueError(f"linear: no library here knows the layout {weight.layout}")
        _same_k_and_dtype(op, x, weight)
        run(x, weight.data, weight.n, weight.k, bias, out)
        return out
    from . import reference

    tx, tb, to = (_arrays.as_torch(t) for t in (x, bias, out))
    tw = _rows(weight) if isinstance(weight, PackedWeight) else _arrays.as_torch(weight)
    _check_linear(op, tx, tw, tb, to)
    result = reference.linear(tx, tw, tb, out=to, compute_dtype=_accumulator(tx, tb))
    return result if out is None else out


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
        _checks.same_dtype(op, "out", out, "x", x)
    if bias is not None:
        _checks.shape(op, "bias", bias, (w.shape[0],), "outputs of weight")
        if _arrays.dtype_name(bias) != "float32":
            _checks.same_dtype(op, "bias", bias, "x", x)
