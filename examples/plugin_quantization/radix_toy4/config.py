"""Which layers of a checkpoint are in toy4."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from radix_runtime.quantization.base import LinearMethod
from radix_runtime.quantization.config import (
    LayerKind,
    QuantizationConfig,
    Target,
    read_settings,
    unquantized,
)
from radix_runtime.quantization.names import NameList

from .method import Toy4Method


class Toy4Settings(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of `quantization_config`."""

    left_out: list[str] = []


class Toy4Config(QuantizationConfig):
    """Linear layers and experts but for those that the file lists as left out."""

    def __init__(self, left_out: Sequence[str]) -> None:
        self._left_out = NameList(left_out)

    @classmethod
    def from_checkpoint(cls, raw: Mapping[str, Any], target: Target) -> QuantizationConfig:
        return cls(read_settings(raw, Toy4Settings).left_out)

    def method_of(self, name: str, kind: LayerKind) -> LinearMethod:
        if not kind.is_product or name in self._left_out:
            return unquantized(kind)
        return Toy4Method()
