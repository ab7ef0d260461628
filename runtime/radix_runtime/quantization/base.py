"""LinearMethod: how the weight of a linear layer is held and multiplied. One file a format."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import ops
from ..shortcuts import reset_shortcuts
from .params import LinearShape, ParamSpec

# What follows from a method's own `apply`.
_SHORTCUTS = (
    "adds_residual",
    "apply_codes",
    "apply_silu_and_mul",
    "argmax",
    "block_weight",
    "gated",
    "normed",
    "packed_weight",
    "plain_weight",
    "quantizes_x",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTerms:
    """What the experts of a layer have beside their weights: bias1 [E, outputs of gate and up] and
    bias2 [E, hidden_size], or None for none, and the activation as `ops.fused_experts` takes it."""

    bias1: torch.Tensor | None
    bias2: torch.Tensor | None
    activation: ops.Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """x [T, in_features] as a method's product takes it: codes in 8 bits and what they are
    multiplied by. `dtype`: x's own."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


Input = torch.Tensor | Quantized


def normed(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """RMSNorm of x [T, H], or of residual + x, which residual becomes. x's memory may become the
    result."""
    if residual is None:
        return ops.rmsnorm(x, weight, eps)
    ops.fused_add_rmsnorm(x, residual, weight, eps)
    return x


class LinearMethod(ABC):
    """Owns the parameters of a linear layer other than the bias; the layer slices checkpoint
    tensors for its rank and merges them. One instance may serve many layers; `layer` is always the
    module that the parameters are attributes of. Instances of equal format and settings are equal.

    The methods with a body are `apply` by other ways. A subclass that overrides `apply` does not
    inherit those that its base class wrote for its own `apply`."""

    # The format whose weights it widens to the compute type as they load, for want of a kernel.
    widens: str | None = None
    # Ops of the wheel that it needs and most models do not.
    special_ops: tuple[str, ...] = ()
    # A rank's share must begin and end at multiples of these, or the layer cannot be cut there.
    output_unit: int = 1
    input_unit: int = 1
    # Experts of a layer are held in one tensor, [E, out, in], for `fused_experts`, wherever they
    # are; on a GPU they always are.
    stacks_experts: bool = False
    # Weights are FP8 with a scale for each 128 x 128 elements, and so are stacked experts'.
    scales_blocks: bool = False
    # Experts are packed weights on a GPU too, which `ops.fused_experts_packed` multiplies by.
    packs_experts: bool = False
    # `apply` adds the residual in its product; where it does not, the norm that follows can.
    adds_residual: bool = True
    # On a CPU `finalize` makes something else of the parameters, and keeps none of their memory:
    # the next layer's are loaded there, and a tensor of a file is not copied before. A subclass
    # that overrides `finalize` has to say so again.
    repacks: bool = False
    # Sums of its products may be kept to 14 bits (Target.fp8_fast_accum).
    fast_accum: bool = False

    @property
    def quantizes_x(self) -> bool:
        """Whether `normed` and `gated` give codes, in one pass."""
        return False

    @property
    def is_divisible(self) -> bool:
        """Whether each tensor that it holds can be cut into equal parts of the layer's outputs or
        inputs, at multiples of `output_unit` and `input_unit`, so that layers may be merged too."""
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        reset_shortcuts(cls, LinearMethod, "apply", _SHORTCUTS)
        reset_shortcuts(cls, LinearMethod, "finalize", ["repacks", "finalize_parts"])

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def for_shape(self, shape: LinearShape) -> "LinearMethod":
        """The method of a layer of this shape, where another than this must hold it: its kernel may
        not take every size."""
        return self

    @abstractmethod
    def params(self, shape: LinearShape, dtype: torch.dtype) -> Sequence[ParamSpec]:
        """What a checkpoint must hold for a layer of this shape; `dtype` is the model's compute
        type. Raises ConfigError where the layer cannot be held or cut in this way."""

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        """What the weight of a layer of this shape takes in memory once it is loaded: as much as in
        the checkpoint, by default."""
        return sum(
            math.prod(spec.shape_on_rank(shape)) * spec.dtype.itemsize
            for spec in self.params(shape, dtype)
        )

    @abstractmethod
    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, in_features] -> x W^T + bias + residual, [T, out_features], rounded once.

        bias: [out_features]. residual: [T, out_features] of x's dtype. out_dtype: x's dtype by
        default, or float32. The memory of `out`, which has the result's shape and dtype, or else
        that of `residual` may become the result."""

    @abstractmethod
    def finalize(self, layer: Any) -> None:
        """Called once, when all parameters of the layer are loaded: repack them by `layer.hold`,
        which frees them. Raises ValueError when their values cannot be held in this format,
        ConfigError when the device cannot use it."""

    def finalize_parts(self, layer: Any, parts: Sequence[torch.Tensor]) -> None:
        """`finalize` where `repacks`, of a layer of one parameter: that is `parts`, one under the
        other, which may be pieces of files."""
        (name,) = layer.stored
        weight = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        setattr(layer, name, nn.Parameter(weight, requires_grad=False))
        self.finalize(layer)

    def apply_codes(
        self,
        layer: Any,
        x: Quantized,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`apply` of an x that this method's own `normed` or `gated` has quantized."""
        raise NotImplementedError(f"{type(self).__name__} takes no codes")

    def normed(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> Input:
        """The function `normed`; codes for `apply_codes` where `quantizes_x`."""
        return normed(x, weight, eps, residual)

    def gated(self, x: torch.Tensor) -> Input:
        """silu(gate) * up of x [T, 2 in_features], its two halves; codes for `apply_codes` where
        `quantizes_x`."""
        return ops.silu_and_mul(x)

    def apply_silu_and_mul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, where gate and up are the two halves of the outputs: [T, in_features] ->
        [T, out_features / 2]. A kernel may do it in one pass, rounding once."""
        return ops.silu_and_mul(self.apply(layer, x))

    def argmax(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """The index of the largest output of each row, int32 [T], -1 where none is finite, without
        writing the outputs; None where no kernel can."""
        weight = self.packed_weight(layer)
        return None if weight is None else ops.linear_argmax(x, weight)[0]

    def packed_weight(self, layer: Any) -> ops.PackedWeight | None:
        """The loaded weight, where `apply` is `ops.linear` by it and nothing more, so that a kernel
        may read it directly; None otherwise."""
        return None

    def plain_weight(self, layer: Any) -> torch.Tensor | None:
        """The loaded weight [out_features, in_features] in the compute type, contiguous, where
        `apply` is the product by it and nothing more, and nothing writes it any more; None
        otherwise."""
        return None

    def block_weight(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Codes [out, in] and scales [out / 128, in / 128], float32, of a weight that
        `scales_blocks`, where `apply` is the product by it and nothing more; None otherwise."""
        return None

    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        """The rows `ids` int32 [T] of the weight, [T, in_features], in the compute type."""
        return ops.embedding(ids, layer.weight)

    def fused_experts(
        self,
        x: torch.Tensor,
        w1: Mapping[str, torch.Tensor],
        w2: Mapping[str, torch.Tensor],
        weights: torch.Tensor,
        ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        terms: ExpertTerms,
    ) -> torch.Tensor:
        """The weighted sum of experts that are held in one tensor: x [T, hidden_size], weights
        float32 [T, top_k] and ids int32 [T, top_k] -> [T, hidden_size]. w1, w2: what the layers of
        gate and up, and of down, hold, stacked, [E, ...], by name. expert_map: int32 [experts], the
        numbers of this rank's, -1 for others. terms: biases and activation."""
        raise NotImplementedError(f"{type(self).__name__} holds no experts in one tensor")

    def fill_random(
        self, layer: Any, name: str, memory: torch.Tensor, generator: torch.Generator
    ) -> None:
        """Values for parameter `name` where no checkpoint is read."""
        memory.normal_(0, 0.02, generator=generator)


def meta_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without memory; the loader gives it some."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
