"""Formats that quantize a checkpoint in the compute type as it loads (`--quantization`)."""

from abc import abstractmethod

from .base import LinearMethod
from .config import LayerKind, QuantizationConfig, Target, require_kernel, unquantized
from .dense import Int4Method, Int8Method


class AtLoad(QuantizationConfig):
    """Layers and experts are held by `linear()`, the vocabulary matrix by `head()`; routers
    and embeddings that are no head too keep the compute type."""

    @classmethod
    def at_load(cls, name: str, target: Target) -> QuantizationConfig:
        return cls()

    @abstractmethod
    def linear(self) -> LinearMethod:
        """The method of linear layers and experts."""

    def head(self) -> LinearMethod:
        """The method of the vocabulary matrix, as a head or tied."""
        return unquantized(LayerKind.HEAD)

    def method_of(self, name: str, kind: LayerKind) -> LinearMethod:
        if kind.is_product:
            return self.linear()
        if kind in (LayerKind.HEAD, LayerKind.TIED_HEAD):
            return self.head()
        return unquantized(kind)


class Int8AtLoad(AtLoad):
    """INT8, the vocabulary matrix too. `quantizes_x`: x is taken in 8 bits, as the CPU multiplies
    them fastest."""

    def __init__(self, *, quantizes_x: bool) -> None:
        self.quantizes_x = quantizes_x

    @classmethod
    def at_load(cls, name: str, target: Target) -> QuantizationConfig:
        for kind in ("int8", name):
            require_kernel(target, f"--quantization {name}", kind)
        return cls(quantizes_x=target.is_cpu)

    def linear(self) -> LinearMethod:
        return Int8Method(quantizes_x=self.quantizes_x)

    def head(self) -> LinearMethod:
        return Int8Method(quantizes_x=self.quantizes_x)


class Int4AtLoad(Int8AtLoad):
    """INT4; the vocabulary matrix is INT8."""

    def linear(self) -> LinearMethod:
        return Int4Method(quantizes_x=self.quantizes_x)
