"""Formats that quantize a checkpoint in the compute type as it loads (`--quantization`)."""

from abc import abstractmethod

from ..errors import ConfigError
from .base import LinearMethod
from .config import LayerKind, QuantizationConfig, Target, unquantized
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
    """INT8, the vocabulary matrix too."""

    @classmethod
    def at_load(cls, name: str, target: Target) -> QuantizationConfig:
        if not target.is_cpu:
            raise ConfigError(f"--quantization {name} is for the CPU; GPUs have fp8")
        return cls()

    def linear(self) -> LinearMethod:
        return Int8Method()

    def head(self) -> LinearMethod:
        return Int8Method()


class Int4AtLoad(Int8AtLoad):
    """INT4; the vocabulary matrix is INT8."""

    def linear(self) -> LinearMethod:
        return Int4Method()
