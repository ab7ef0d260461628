"""Products in 8 bits, which round x too: by itself, or in one pass with the norm or the activation
before it."""

from abc import abstractmethod
from typing import Any

import torch

from .base import Input, LinearMethod, Quantized

Codes = tuple[torch.Tensor, torch.Tensor]  # and their scales


class QuantizingProduct(LinearMethod):
    """Subclasses quantize, and multiply in `apply_codes`. Where `quantizes_x` is False, as where x
    has a scale of the checkpoint's, x is quantized by itself alone."""

    adds_residual = False

    @property
    def quantizes_x(self) -> bool:
        return True

    @abstractmethod
    def quantized(self, layer: Any, x: torch.Tensor) -> Codes:
        """Of x [T, in]."""

    @abstractmethod
    def rmsnorm_quantized(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> Codes:
        """Of `normed`."""

    @abstractmethod
    def silu_and_mul_quantized(self, x: torch.Tensor) -> Codes:
        """Of `gated`."""

    @abstractmethod
    def apply_codes(
        self,
        layer: Any,
        x: Quantized,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """LinearMethod.apply_codes, also of what `quantized` gave."""

    def normed(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> Input:
        if not self.quantizes_x:
            return super().normed(x, weight, eps, residual)
        return _of(x, self.rmsnorm_quantized(x, weight, eps, residual))

    def gated(self, x: torch.Tensor) -> Input:
        if not self.quantizes_x:
            return super().gated(x)
        return _of(x, self.silu_and_mul_quantized(x))

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
        codes = _of(x, self.quantized(layer, x))
        result = self.apply_codes(layer, codes, bias=bias, residual=residual)
        return result if out_dtype is None else result.to(out_dtype)


def _of(x: torch.Tensor, made: Codes) -> Quantized:
    codes, scales = made
    return Quantized(codes=codes, scales=scales, dtype=x.dtype)
