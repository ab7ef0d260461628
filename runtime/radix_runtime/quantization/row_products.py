"""Products with 8-bit weights that have a scale for each output, where x is quantized too."""

from abc import abstractmethod
from typing import Any

import torch

from .base import Quantized
from .params import LinearShape
from .quantizing_product import QuantizingProduct
from .storage import added

_ALIGNMENT = 16  # of both sizes of a weight


class RowProduct(QuantizingProduct):
    """layer.weight, 8 bits, [out, in] and weight_scale float32 [out]. x has one scale for each row,
    or for all."""

    @abstractmethod
    def product(self, *operands: torch.Tensor, **options: Any) -> torch.Tensor:
        """codes @ weight.T of the wheel, with the scales of both."""

    def apply_codes(
        self,
        layer: Any,
        x: Quantized,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result = self.product(
            x.codes,
            layer.weight.t(),
            x.scales,
            layer.weight_scale,
            out_dtype=x.dtype,
            bias=bias,
            static_weight=True,
        )
        return added(result, residual)


def has_whole_rows(shape: LinearShape) -> bool:
    """Whether the kernels take a weight of this shape, of which 16 bytes are read at a time."""
    return shape.in_features % _ALIGNMENT == 0 and shape.out_features % _ALIGNMENT == 0
