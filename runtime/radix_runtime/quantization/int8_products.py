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
from .quantizing_product import Codes
from .row_products import RowProduct, has_whole_rows
from .storage import StorageMethod, WidenedMethod, check_finite

_MOST_INPUTS = 131056  # so that no sum passes 32 bits


class Int8RowMethod(StorageMethod, RowProduct):
    """A checkpoint's INT8 with a scale for each output or for the whole tensor: layer.weight int8
    [out, in], weight_scale float32 [out]. Merged tensors keep their own scales."""

    storage: Int8Storage
    special_ops = (
        "int8_scaled_mm",
        "per_token_quant_int8",
        "rmsnorm_quant_int8",
        "silu_and_mul_quant_int8",
    )

    def for_shape(self, shape: LinearShape) -> LinearMethod:
        is_taken = has_whole_rows(shape) and shape.in_features <= _MOST_INPUTS
        return self if is_taken else WidenedMethod(self.storage)

    def finalize(self, layer: Any) -> None:
        scales = self.storage.channel_scales(layer)
        check_finite(scales)
        layer.hold(weight=layer.weight.data, weight_scale=scales)

    def quantized(self, layer: Any, x: torch.Tensor) -> Codes:
        return ops.per_token_quant_int8(x)

    def rmsnorm_quantized(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> Codes:
        return ops.rmsnorm_quant_int8(x, weight, eps, residual=residual)

    def silu_and_mul_quantized(self, x: torch.Tensor) -> Codes:
        return ops.silu_and_mul_quant_int8(x)

    def product(self, *operands: torch.Tensor, **options: Any) -> torch.Tensor:
        return ops.int8_scaled_mm(*operands, **options)


def w8a8_method(storage: Int8Storage, kind: LayerKind, target: Target) -> LinearMethod:
    """What multiplies INT8 weights by x in INT8 on this target."""
    if target.is_cpu:
        return codes_method(storage, target)
    if target.dtype == torch.float32:
        return WidenedMethod(storage)
    if kind is LayerKind.EXPERT:
        return WidenedMethod(storage)  # no kernel of a GPU multiplies experts by x in INT8
    return Int8RowMethod(storage)
