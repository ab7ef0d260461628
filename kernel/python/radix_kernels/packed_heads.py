"""A product of each head by a packed weight of its own, all in one call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import _arrays, _checks, _loader
from ._arrays import Array, torch_views
from .linear import linear
from .packed_weight import PackedWeight


@dataclass(frozen=True)
class PackedHeads:
    """The weights of heads, one or more, each [N, K] packed alone. ValueError for none and for
    weights of several sizes."""

    weights: tuple[PackedWeight, ...]
    native: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        op = "PackedHeads"
        _checks.require(op, len(self.weights) > 0, "there are no weights")
        sizes = {weight.shape for weight in self.weights}
        _checks.require(op, len(sizes) == 1, f"weights are of several sizes: {sorted(sizes)}")
        make = getattr(_loader.bind, "PackedHeads", None)
        if make is None or not all(weight.is_native for weight in self.weights):
            return
        native = make([(weight.descriptor, weight.data) for weight in self.weights])
        object.__setattr__(self, "native", native)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, N, K."""
        outputs, inputs = self.weights[0].shape
        return len(self.weights), outputs, inputs

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return sum(weight.nbytes for weight in self.weights)


def linear_heads(x: Array, heads: PackedHeads, *, out: Array | None = None) -> Array:
    """`out[:, h] = linear(x[:, h], heads.weights[h])`, with its bits.

    x: [T, H, K] of the weights' dtype; out: [T, H, N] of it or float32, x's dtype by default;
    returned; it must not overlap x. Last dimensions contiguous, other strides free. One call of the
    CPU library, where the heads share the threads as one list of tasks; elsewhere one product after
    the other.
    Errors: TypeError (dtype), ValueError (shape, stride).
    """
    op = "linear_heads"
    _checks.rank(op, "x", x, 3)
    count, outputs, inputs = heads.shape
    if out is None:
        out = _arrays.empty(x, (int(x.shape[0]), count, outputs), _arrays.dtype_name(x))
    if heads.native is not None:
        heads.native.run(x, out)
        return out
    given, target = torch_views(x, out)
    tokens = given.shape[0]
    _checks.shape(op, "x", given, (tokens, count, inputs), "tokens, heads, inputs of weights")
    _checks.shape(op, "out", target, (tokens, count, outputs), "tokens, heads, outputs of weights")
    for head, weight in enumerate(heads.weights):
        product = linear(given[:, head].contiguous(), weight, out_dtype=target.dtype)
        target[:, head].copy_(product)
    return out
