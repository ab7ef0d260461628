"""Products with 8-bit weights that have a scale for each output, where x is quantized too."""

from abc import abstractmethod
from typing import Any

import torch

from .base import Input, LinearMethod, Quantized
from .params import LinearShape
from .storage import added

_ALIGNMENT = 16  # of both sizes of a weight


class RowProduct(LinearMethod):
    """layer.weight, 8 bits, [out, in] and weight_scale float32 [out]. Where x has a scale for each
    row, it is quantized in one pass with the norm or the activation before it."""

    adds_residual = False

    @property
    def quantizes_x(self) -> bool:
        return True

    @abstractmethod
    def rmsnorm_quantized(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of `normed`."""

    @abstractmethod
    def silu_and_mul_quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of `gated`."""

    @abstractmethod
    def quantized(self, layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of x [T, in] and their scales, float32: one for each row, or for all."""

    @abstractmethod
    def product(self, *operands: torch.Tensor, **options: Any) -> torch.Tensor:
        """codes @ weight.T of the wheel, with the scales of both."""

    def normed(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> Input:
        if not self.quantizes_x:
            return super().normed(x, weight, eps, residual)
        codes, scales = self.rmsnorm_quantized(x, weight, eps, residual)
        return Quantized(codes=codes, scales=scales, dtype=x.dtype)

    def gated(self, x: torch.Tensor) -> Input:
        if not self.quantizes_x:
            return super().gated(x)
        codes, scales = self.silu_and_mul_quantized(x)
        return Quantized(codes=codes, scales=scales, dtype=x.dtype)

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
        codes, scales = self.quantized(layer, x)
        both = Quantized(codes=codes, scales=scales, dtype=x.dtype)
        result = self.apply_codes(layer, both, bias=bias, residual=residual)
        return result if out_dtype is None else result.to(out_dtype)

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
