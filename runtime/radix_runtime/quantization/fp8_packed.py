"""FP8 weights on the CPU: the codes are held as they are, and x, which is not quantized there,
meets what they stand for."""

from typing import Any

import torch

from .. import ops
from .base import LinearMethod
from .dense import DenseMethod, packed_codes_bytes
from .fp8 import Fp8Storage
from .params import LinearShape
from .storage import StorageMethod, WidenedMethod, check_finite


class Fp8PackedMethod(StorageMethod, DenseMethod):
    """A checkpoint's FP8: every code and scale is kept, those of merged tensors too. A scale of x
    in the files is not used."""

    storage: Fp8Storage
    kind = "fp8"
    packs_experts = True

    def for_shape(self, shape: LinearShape) -> LinearMethod:
        has_groups = self.storage.input_group(shape.inputs) is not None
        return self if has_groups else WidenedMethod(self.storage)

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        return packed_codes_bytes(shape, self.storage.input_group(shape.inputs) or 0)

    def finalize(self, layer: Any) -> None:
        group = self.storage.input_group(layer.shape.inputs) or 0
        scales = self.storage.group_scales(layer, group)
        check_finite(scales)
        weight = ops.pack_weight(
            layer.weight.data, scales, self.kind, group=group, dtype=layer.compute_dtype
        )
        layer.hold(weight=weight)


class Fp8PackedAtLoad(DenseMethod):
    """Quantizes a weight in the compute type as it loads, with a scale for each output."""

    kind = "fp8"
    packs_experts = True

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        return packed_codes_bytes(shape, 0)
