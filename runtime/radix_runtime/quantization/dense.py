"""Weights in the compute type or quantized as they load: packed by the kernel wheel on the CPU,
plain on a GPU."""

from typing import Any

import torch

from .. import ops
from ..errors import ConfigError
from .base import LinearMethod, meta_parameter


class DenseMethod(LinearMethod):
    """`layer.weight` is an [out, in] parameter until finalize; on the CPU the packed weight takes
    its place there. `kind` is that of `ops.pack_weight`; None, the compute type, works on a GPU
    too."""

    kind: str | None = None

    def create(self, layer: Any, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        layer.weight = meta_parameter(out_features, in_features, dtype=dtype)

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
        if out is None:
            out = residual
        return ops.linear(x, layer.weight, bias, residual=residual, out_dtype=out_dtype, out=out)

    def apply_silu_and_mul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return ops.linear_silu_and_mul(x, layer.weight)

    def packed_weight(self, layer: Any) -> ops.PackedWeight | None:
        return layer.weight if isinstance(layer.weight, ops.PackedWeight) else None

    def finalize(self, layer: Any, name: str) -> None:
        if name != "weight":
            return
        if layer.weight.device.type == "cpu":
            source = layer.weight.data
            del layer.weight
            layer.weight = ops.pack_weight(source, kind=self.kind)
        elif self.kind is not None:
            raise ConfigError("--quantization int8 and int4 are for the CPU")


class Int8Method(DenseMethod):
    """8-bit weights with a scale for each output; x in 8 bits too, with a scale for each token."""

    kind = "w8a8"

    def for_head(self) -> LinearMethod:
        return self


class Int4Method(DenseMethod):
    """4-bit weights with a scale for each 64 inputs; x in 8 bits in the same groups. The vocabulary
    matrix is held as int8."""

    kind = "w4a8"

    def for_head(self) -> LinearMethod:
        return Int8Method()
