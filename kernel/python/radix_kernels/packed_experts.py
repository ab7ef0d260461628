"""The experts' products over packed weights: on the CPU in each kind, on a GPU those of codes, by
Hopper's kernel in INT4 and MXFP4 and by Triton elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from . import _arrays, _checks, _dispatch, _loader
from ._arrays import Array, torch_views
from ._checks.moe import check_biases, check_expert_shapes, check_packed_experts
from ._lazy import reference
from .codes_layout import CODES_LAYOUT, CodeParts, CodeProduct, split
from .gating import Activation, Gating, read_gating
from .gemm import linear_silu_and_mul
from .linear import linear
from .moe import moe_align_block_size
from .packed_weight import FRAGMENT_LAYOUT, REFERENCE_LAYOUT, PackedWeight, pack_weight, wait
from .stacked_experts import StackedExperts, check_inputs, may_take, stack, takes
from .weight_stack import stack_codes, to_rows_of_codes


@dataclass(frozen=True)
class PackedExperts:
    """The weights of E experts, each packed alone, so that a step reads those that it names and no
    others.

    w1[e]: gate and up, [2 I, H]; w2[e]: [H, I]. On a GPU the weights of codes are rows of one
    tensor a side: where they are not, they are copied into such, one after the other, and w1 and w2
    become parts of it. What Hopper's kernel does not take is held in rows of codes, for Triton's.
    activation: that of the products to come, by which the order is chosen there: the kernel has
    `silu` and the clamped SwiGLU alone. Other devices multiply with any. ValueError for an
    activation that is none, and for weights on a GPU that cannot be of one form.
    """

    w1: tuple[PackedWeight, ...]
    w2: tuple[PackedWeight, ...]
    activation: Activation = "silu"
    native: Any = field(default=None, init=False, repr=False, compare=False)
    stacked: StackedExperts | None = field(default=None, init=False, repr=False, compare=False)
    stacks: tuple[Any, Any] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gating = read_gating("PackedExperts", self.activation)
        if self.w1 and self.w1[0].layout in (CODES_LAYOUT, FRAGMENT_LAYOUT):
            self._stack(gating)
            return
        make = getattr(_loader.bind, "PackedExperts", None)
        if make is None or not self.w1:
            return
        if any(w.layout == REFERENCE_LAYOUT for w in (*self.w1, *self.w2)):
            return
        weights = [
            ((w1.descriptor, w1.data), (w2.descriptor, w2.data))
            for w1, w2 in zip(self.w1, self.w2, strict=True)
        ]
        object.__setattr__(self, "native", make(weights))

    @staticmethod
    def part(
        weight: PackedWeight, *, hidden: int, width: int, activation: Activation = "silu"
    ) -> PackedWeight:
        """A weight of either product, [2 I, H] or [H, I], in the order in which `PackedExperts`
        holds it: of a list of such nothing need be brought to another.

        hidden: H; width: I; activation: as `PackedExperts` takes it. In rows of codes where
        Hopper's kernel would not take it; else itself. ValueError for an activation that is none.
        """
        gating = read_gating("PackedExperts", activation)
        if may_take(weight, hidden=hidden, width=width, gating=gating):
            return weight
        return to_rows_of_codes(weight)

    def _stack(self, gating: Gating) -> None:
        op = "PackedExperts"
        check_expert_shapes(op, [w.shape for w in self.w1], [w.shape for w in self.w2])
        if takes(self.w1, self.w2, gating):
            self._set(zip(("stacked", "w1", "w2"), stack(self.w1, self.w2), strict=True))
        else:
            w1, first = stack_codes(op, self.w1)
            w2, second = stack_codes(op, self.w2)
            self._set({"w1": w1, "w2": w2, "stacks": (first, second)}.items())
        wait(_arrays.as_torch(self.w1[0].data))

    def _set(self, fields: Iterable[tuple[str, Any]]) -> None:
        for name, value in fields:
            object.__setattr__(self, name, value)

    @cached_property
    def _parts(self) -> tuple[CodeParts, CodeParts]:
        assert self.stacks is not None
        first, second = self.stacks
        return split(first, self.w1[0].descriptor), split(second, self.w2[0].descriptor)

    def products(self, bias1: Any, bias2: Any) -> tuple[CodeProduct, CodeProduct]:
        """Of stacks: both products, with biases [E, outputs] or None."""
        first, second = self._parts
        return (
            CodeProduct(parts=first, form=self.w1[0].descriptor, bias=bias1),
            CodeProduct(parts=second, form=self.w2[0].descriptor, bias=bias2),
        )

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return sum(w.nbytes for w in (*self.w1, *self.w2))

    @property
    def width(self) -> int:
        """I: how wide an expert is inside."""
        return self.w2[0].shape[1] if self.w2 else 0

    def gated_product(
        self, expert: int, x: Array, bias: Array | None = None, activation: Activation = "silu"
    ) -> Array:
        """The gated activation of rows x [n, H] by one expert's w1, plus bias [2 I]: [n, I] of x's
        dtype."""
        if bias is None and activation == "silu":
            return linear_silu_and_mul(x, self.w1[expert])
        both = _arrays.as_torch(linear(x, self.w1[expert], bias, out_dtype="float32"))
        gate, up = both.chunk(2, -1)
        return reference.gated(gate, up, activation).to(x.dtype)

    def down_product(self, expert: int, x: Array, bias: Array | None = None) -> Array:
        """Rows x [n, I] by one expert's w2, plus bias [H]: [n, H] of x's dtype."""
        return linear(x, self.w2[expert], bias)


def pack_experts(
    w1: Array, w2: Array, kind: str | None = None, *, group: int | None = None
) -> PackedExperts:
    """Pack w1 [E, 2 I, H] and w2 [E, H, I] expert by expert; kind and group as `pack_weight` takes
    them. For another activation than `silu`: `PackedExperts` of the result's w1 and w2.

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
    return PackedExperts(
        w1=tuple(pack_weight(w1[expert], None, kind, **options) for expert in range(experts)),
        w2=tuple(pack_weight(w2[expert], None, kind, **options) for expert in range(experts)),
    )


def fused_experts_packed(
    hidden_states: Array,
    experts: PackedExperts,
    topk_weights: Array,
    topk_ids: Array,
    *,
    bias1: Array | None = None,
    bias2: Array | None = None,
    activation: Activation = "silu",
    expert_map: Array | None = None,
    out: Array | None = None,
) -> Array:
    """`fused_experts` over packed weights: every named expert's two products, over its tokens at
    once, in one call of the CPU library or, of codes on a GPU, of the CUDA library on Hopper
    (`int4`, `int8`, `mxfp4`) and of Triton; elsewhere one expert after the other in Python.

    hidden_states: [T, H] of the weights' dtype, last dimension contiguous; topk_weights: float32,
    topk_ids: int32 [T, topk]; a pair whose id is outside of the experts adds nothing. expert_map:
    int32, an expert's local number, -1: another rank's. bias1, bias2, activation: as
    `fused_experts` takes them. out: [T, H], may be hidden_states. Returns out.

    The gated activation and each expert's result are rounded to the dtype on the way, and added in
    float32 in the order of the columns of topk_ids: on the CPU a row's bits depend on no other row.
    Codes on Hopper stand for their values where experts have few pairs, and for those rounded to
    the dtype once where they have more.
    Reads topk_ids on the host, but for codes on a GPU. Tolerance as `fused_experts` with the
    weights that were packed. Errors: TypeError (dtype), ValueError (shape).
    """
    op = "fused_experts_packed"
    x, weights, ids = torch_views(hidden_states, topk_weights, topk_ids)
    mapped, target = torch_views(expert_map, out)
    b1, b2 = torch_views(bias1, bias2)
    check_packed_experts(op, x, weights, ids, mapped, target)
    check_biases(op, x, b1, b2, len(experts.w1), experts.width)
    gating = read_gating(op, activation)
    if experts.stacked is not None:
        result = _arrays.empty_like(hidden_states) if out is None else out
        there = _arrays.as_torch(result)
        if experts.stacked.run(x, weights, ids, mapped, there, biases=(b1, b2), gating=gating):
            return result
    by_triton = _triton_kernel(op, x, experts, target)
    if by_triton is not None:
        result = _arrays.empty_like(hidden_states) if out is None else out
        there = _arrays.as_torch(result)
        first, second = experts.products(b1, b2)
        by_triton(x, first, second, weights, ids, mapped, there, gating, moe_align_block_size)
        return result
    if experts.native is not None:
        result = _arrays.empty_like(hidden_states) if out is None else out
        ids = ids.contiguous()
        workspace = _arrays.empty(x, (experts.native.workspace_size(x, ids),), "uint8")
        terms = (b1, b2, tuple(gating))
        experts.native.run(x, weights.contiguous(), ids, *terms, mapped, result, workspace)
        return result
    result = reference.fused_experts_packed(
        x, experts, weights, ids, bias1=b1, bias2=b2, activation=activation, expert_map=mapped,
        out=target,
    )  # fmt: skip
    return result if out is None else out


def _triton_kernel(op: str, x: Any, experts: PackedExperts, out: Any) -> _dispatch.Native | None:
    """Triton's kernel for experts in stacks of codes; None where they are in none."""
    if experts.stacks is None:
        return None
    check_inputs(op, x, experts.w1[0])
    _checks.contiguous_last(op, "hidden_states", x)
    if out is not None:
        _checks.contiguous_last(op, "out", out)
    return _dispatch.native("fused_experts_codes", x)
