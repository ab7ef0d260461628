"""Packed weights of all experts, one after the other in one tensor, as Hopper's kernel takes them
(docs/kernels/quantized.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import _checks, _dispatch, _loader
from ._arrays import empty
from .codes_layout import CodesForm
from .gating import SILU, SWIGLU_CLAMPED, Gating
from .packed_weight import FRAGMENT_LAYOUT, PackedWeight
from .weight_kinds import kind_number
from .weight_stack import in_one

_KERNEL = "fused_experts_mixed"
# Kinds, and the groups that each may have (0: whole rows).
_GROUPS = {"int4": (0, 32, 64, 128), "int8": (0, 128), "mxfp4": (32,)}
_MOST_EXPERTS = 1024
_ACTIVATIONS = (SILU, SWIGLU_CLAMPED)


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """w1, w2: uint8 [E, bytes of an expert's packed weight]; first and second: what stands for the
    weights of each, a part of w1 and of w2."""

    w1: Any
    w2: Any
    first: PackedWeight
    second: PackedWeight

    def run(
        self,
        x: Any,
        weights: Any,
        ids: Any,
        mapped: Any,
        out: Any,
        *,
        biases: tuple[Any, Any],
        gating: Gating,
    ) -> bool:
        """`fused_experts_packed` of checked tensors by the library, into out. False where there is
        no kernel for the call."""
        check_inputs("fused_experts_packed", x, self.first)
        ids = ids.contiguous()
        weights = weights.contiguous()

        def call(kernel: _dispatch.Native, _: bool) -> None:
            if gating.number not in _ACTIVATIONS:
                raise NotImplementedError(
                    f"{_KERNEL}: the experts are packed for silu or the clamped SwiGLU; packed "
                    "with another activation they are Triton's"
                )
            kernel(
                x, self.w1, self.w2, *biases, weights, ids, mapped, out,
                self._workspace(x, ids, mapped), kind_number(self.first.kind), self.first.group,
                self.first.zeros, self.first.scale_dtype, self.second.k, gating.number,
                1.0 if gating.number == SILU else gating.alpha, gating.limit,
            )  # fmt: skip

        return _dispatch.attempt(_KERNEL, x, call)

    def _workspace(self, x: Any, ids: Any, mapped: Any) -> Any:
        bind: Any = _loader.bind
        named = self.w1.shape[0] if mapped is None else mapped.shape[0]
        tokens, topk = ids.shape
        size = bind.fused_experts_workspace_size(tokens, topk, named, *self.second.shape)
        return empty(x, (size,), "uint8")


def check_inputs(op: str, x: Any, first: PackedWeight) -> None:
    """TypeError or ValueError unless hidden_states fits the weights of the first product."""
    _checks.dtype(op, "hidden_states", x, (first.dtype,))
    _checks.shape(op, "hidden_states", x, (x.shape[0], first.k), "inputs of w1")


def may_take(weight: PackedWeight, *, hidden: int, width: int, gating: Gating) -> bool:
    """Whether the kernel multiplies by such a weight of either product, of experts of these sizes:
    packed for it, and of a kind and a group that it knows."""
    fits = hidden % 8 == 0 and width % 16 == 0 and gating.number in _ACTIVATIONS
    return (
        fits and weight.layout == FRAGMENT_LAYOUT and weight.group in _GROUPS.get(weight.kind, ())
    )


def takes(w1: Sequence[PackedWeight], w2: Sequence[PackedWeight], gating: Gating) -> bool:
    """Whether the kernel multiplies by these weights: by each of them, and they are alike but for
    the shape."""
    first = w1[0]
    second = w2[0]
    same = all(w.is_like(first) for w in w1) and all(w.is_like(second) for w in w2)
    alike = first.layout == second.layout and _but_for_shape(first) == _but_for_shape(second)
    hidden, width = second.shape
    fits = first.shape == (2 * width, hidden) and len(w1) <= _MOST_EXPERTS
    return same and alike and fits and may_take(first, hidden=hidden, width=width, gating=gating)


def stack(
    w1: Sequence[PackedWeight], w2: Sequence[PackedWeight]
) -> tuple[StackedExperts, tuple[PackedWeight, ...], tuple[PackedWeight, ...]]:
    """The stack of weights that the kernel takes, and the same weights as parts of it: what held
    them before may be freed."""
    held1, rows1 = in_one(w1)
    held2, rows2 = in_one(w2)
    return StackedExperts(w1=rows1, w2=rows2, first=held1[0], second=held2[0]), held1, held2


def _but_for_shape(weight: PackedWeight) -> CodesForm:
    return replace(weight.form, n=0, k=0)
