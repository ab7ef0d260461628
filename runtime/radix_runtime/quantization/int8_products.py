"""INT8 products of the wheel, on GPUs: a scale for each output, and x in INT8 too, with a scale for
each token."""

from typing import Any

import torch

from .. import ops
from .base import LinearMethod
from .codes import codes_method
from .config import LayerKind, Target
from .packed_int import Int8Storage
from .params import LinearShape
from .storage import StorageMethod, WidenedMethod, added, check_finite

_ALIGNMENT = 16  # of both sizes of a weight
_MOST_INPUTS = 131056  # so that no sum passes 32 bits


class Int8RowMethod(StorageMethod):
    """A checkpoint's INT8 with a scale for each output or for the whole tensor: layer.weight int8
    [out, in], weight_scale float32 [out]. Merged tensors keep their own scales."""

    storage: Int8Storage
    special_ops = ("int8_scaled_mm", "per_token_quant_int8")

    def for_shape(self, shape: LinearShape) -> LinearMethod:
        is_odd = shape.in_features % _ALIGNMENT or shape.out_features % _ALIGNMENT
        is_long = shape.in_features > _MOST_INPUTS
        return WidenedMethod(self.storage) if is_odd or is_long else self

    def finalize(self, layer: Any) -> None:
        scales = self.storage.channel_scales(layer)
        check_finite(scales)
        layer.hold(weight=layer.weight.data, weight_scale=scales)

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
        codes, scales = ops.per_token_quant_int8(x)
        result = ops.int8_scaled_mm(
            codes,
            layer.weight.t(),
            scales,
            layer.weight_scale,
            out_dtype=x.dtype,
            bias=bias,
            static_weight=True,
        )
        return added(result, residual, out_dtype)


def w8a8_method(storage: Int8Storage, kind: LayerKind, target: Target) -> LinearMethod:
    """What multiplies INT8 weights by x in INT8 on this target."""
    if target.is_cpu:
        return codes_method(storage, target)
    if target.dtype == torch.float32:
        return WidenedMethod(storage)
    if kind is LayerKind.EXPERT:
        return WidenedMethod(storage)  # no kernel of a GPU multiplies experts by x in INT8
    return Int8RowMethod(storage)
