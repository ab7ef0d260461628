"""The experts' products over packed weights: mixture of experts on the CPU, in bf16, fp16, fp32,
INT8 or INT4."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import _arrays, _checks, _loader
from ._arrays import Array
from .packed_weight import REFERENCE_LAYOUT, PackedWeight, pack_weight


@dataclass(frozen=True)
class PackedExperts:
    """The weights of E experts, each packed alone, so that a step reads those that it names and no
    others.

    w1[e]: gate and up, [2 I, H]; w2[e]: [H, I].
    """

    w1: tuple[PackedWeight, ...]
    w2: tuple[PackedWeight, ...]
    native: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        make = getattr(_loader.bind, "PackedExperts", None)
        if (
            make is None
            or not self.w1
            or any(w.layout == REFERENCE_LAYOUT for w in (*self.w1, *self.w2))
        ):
            return
        native = make()
        for w1, w2 in zip(self.w1, self.w2, strict=True):
            native.add((w1.descriptor, w1.data), (w2.descriptor, w2.data))
        object.__setattr__(self, "native", native)

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return sum(w.nbytes for w in (*self.w1, *self.w2))


def pack_experts(
    w1: Array, w2: Array, kind: str | None = None, *, group: int | None = None
) -> PackedExperts:
    """Pack w1 [E, 2 I, H] and w2 [E, H, I] expert by expert; kind and group as `pack_weight` takes
    them.

    The result holds a copy. Errors: as `pack_weight`; ValueError where the two do not fit together.
    """
    op = "pack_experts"
    for name, w in (("w1", w1), ("w2", w2)):
        _checks.rank(op, name, w, 3)
    experts, hidden, inter = w2.shape
    _checks.shape(
        op,
        "w1",
        w1,
        (experts, 2 * inter, hidden),
        "experts, twice w2's last dimension, hidden size",
    )
    options: dict[str, Any] = {} if kind in (None, "dense") else {"group": group}
    both = [
        tuple(pack_weight(w[e], None, kind, **options) for e in range(experts)) for w in (w1, w2)
    ]
    return PackedExperts(*both)


def fused_experts_packed(
    hidden_states: Array,
    experts: PackedExperts,
    topk_weights: Array,
    topk_ids: Array,
    *,
    expert_map: Array | None = None,
    out: Array | None = None,
) -> Array:
    """`fused_experts` over packed weights: every named expert's two products, over its tokens at
    once, in one call of the CPU library (without it, or on a GPU, one expert after the other in
    Python).

    hidden_states: [T, H] of the weights' dtype, last dimension contiguous; topk_weights: float32,
    topk_ids: int32 [T, topk]; a pair whose id is outside of the experts adds nothing. expert_map:
    int32, an expert's local number, -1: another rank's. out: [T, H], may be hidden_states. Returns
    out.

    silu(gate) * up and each expert's result are rounded to the dtype on the way, and added in
    float32 in the order of the columns of topk_ids: on the CPU a row's bits depend on no other row.
    Reads topk_ids on the host. Tolerance as `fused_experts` with the weights that were packed.
    Errors: TypeError (dtype), ValueError (shape).
    """
    op = "fused_experts_packed"
    x, weights, ids, mapped, to = (
        _arrays.as_torch(t) for t in (hidden_states, topk_weights, topk_ids, expert_map, out)
    )
    _checks.rank(op, "hidden_states", x, 2)
    _checks.dtype(op, "topk_weights", weights, ("float32",))
    _checks.rank(op, "topk_weights", weights, 2)
    _checks.dtype(op, "topk_ids", ids, ("int32",))
    _checks.shape(
        op, "topk_weights", weights, (x.shape[0], weights.shape[1]), "tokens of hidden_states"
    )
    _checks.shape(op, "topk_ids", ids, weights.shape, "as topk_weights")
    if to is not None:
        _checks.shape(op, "out", to, x.shape, "as hidden_states")
        _checks.same_dtype(op, "out", to, "hidden_states", x)
    if mapped is not None:
        _checks.dtype(op, "expert_map", mapped, ("int32",))
    if experts.native is not None:
        result = _arrays.empty_like(hidden_states) if out is None else out
        size = experts.native.workspace_size(x, ids := ids.contiguous())
        space = _arrays.empty(hidden_states, (size,), "uint8")
        experts.native.run(x, weights.contiguous(), ids, mapped, result, space)
        return result
    from . import reference

    result = reference.fused_experts_packed(x, experts, weights, ids, expert_map=mapped, out=to)
    return result if out is None else out
