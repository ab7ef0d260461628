"""FP8 products of the wheel, on GPUs: x is quantized too, with a scale for each token, for each 128
of its inputs, or for all where the checkpoint says which."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import ops
from ..errors import ConfigError
from .base import ExpertTerms, LinearMethod, Quantized
from .dense import DenseMethod
from .fp8 import BLOCK, Fp8Storage
from .params import Inputs, LinearShape, Outputs, ParamSpec
from .quantizing_product import Codes, QuantizingProduct
from .row_products import RowProduct, has_whole_rows
from .storage import StorageMethod, WidenedMethod, added, check_finite

_LARGEST = 448.0  # of e4m3fn
_LEAST_SCALE = 1e-10
_SCALE_BYTES = 4


class Fp8RowProduct(RowProduct):
    """layer.weight FP8 and, where x has one scale for all, input_scale [1]."""

    special_ops = (
        "fp8_scaled_mm",
        "per_tensor_quant_fp8",
        "per_token_quant_fp8",
        "rmsnorm_quant_fp8",
        "silu_and_mul_quant_fp8",
    )
    has_input_scale = False

    @property
    def quantizes_x(self) -> bool:
        return not self.has_input_scale

    def quantized(self, layer: Any, x: torch.Tensor) -> Codes:
        if self.has_input_scale:
            return ops.per_tensor_quant_fp8(x, layer.input_scale)
        return ops.per_token_quant_fp8(x)

    def rmsnorm_quantized(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> Codes:
        return ops.rmsnorm_quant_fp8(x, weight, eps, None, residual=residual)

    def silu_and_mul_quantized(self, x: torch.Tensor) -> Codes:
        return ops.silu_and_mul_quant_fp8(x, None)

    def product(self, *operands: torch.Tensor, **options: Any) -> torch.Tensor:
        return ops.fp8_scaled_mm(*operands, fast_accum=self.fast_accum, **options)


class ScaledExperts(LinearMethod):
    """Experts in one tensor: weight FP8 and weight_scale float32, stacked."""

    stacks_experts = True
    quantizes_experts_x = False  # to FP8, with a scale for each token and 128 of its inputs

    def fused_experts(
        self,
        x: torch.Tensor,
        w1: Mapping[str, torch.Tensor],
        w2: Mapping[str, torch.Tensor],
        weights: torch.Tensor,
        ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        terms: ExpertTerms,
    ) -> torch.Tensor:
        return ops.fused_experts(
            x,
            w1["weight"],
            w2["weight"],
            weights,
            ids,
            w1_scale=w1["weight_scale"],
            w2_scale=w2["weight_scale"],
            bias1=terms.bias1,
            bias2=terms.bias2,
            activation=terms.activation,
            expert_map=expert_map,
            use_fp8_w8a8=self.quantizes_experts_x,
        )


class BlockProduct(ScaledExperts, QuantizingProduct):
    """layer.weight FP8 [out, in], weight_scale float32 [out / 128, in / 128]. x has a scale for
    each token and 128 of its inputs."""

    special_ops = (
        "fp8_blockwise_scaled_mm",
        "per_token_group_quant",
        "rmsnorm_quant_fp8",
        "silu_and_mul_quant_fp8",
    )
    output_unit = BLOCK
    input_unit = BLOCK
    scales_blocks = True
    quantizes_experts_x = True

    @property
    def is_divisible(self) -> bool:
        return True

    def quantized(self, layer: Any, x: torch.Tensor) -> Codes:
        return ops.per_token_group_quant(x, BLOCK)

    def rmsnorm_quantized(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> Codes:
        return ops.rmsnorm_quant_fp8(x, weight, eps, BLOCK, residual=residual)

    def silu_and_mul_quantized(self, x: torch.Tensor) -> Codes:
        return ops.silu_and_mul_quant_fp8(x, BLOCK)

    def block_weight(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        weight: torch.Tensor = layer.weight[: layer.shape.out_features]
        return weight, layer.weight_scale

    def apply_codes(
        self,
        layer: Any,
        x: Quantized,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result = ops.fp8_blockwise_scaled_mm(
            x.codes,
            layer.weight.t(),
            x.scales,
            layer.weight_scale.t(),
            out_dtype=x.dtype,
            static_weight=True,
        )
        if result.shape[1] > layer.shape.out_features:
            result = result[:, : layer.shape.out_features].contiguous()
        return added(result if bias is None else result + bias, residual)


class Fp8RowMethod(StorageMethod, Fp8RowProduct):
    """A checkpoint's FP8 with a scale for each output or for the whole tensor. Merged tensors keep
    their own scales."""

    storage: Fp8Storage

    def __init__(self, storage: Fp8Storage, *, fast_accum: bool = False) -> None:
        super().__init__(storage)
        self.has_input_scale = storage.has_input_scale
        self.fast_accum = fast_accum

    def for_shape(self, shape: LinearShape) -> LinearMethod:
        return self if has_whole_rows(shape) else WidenedMethod(self.storage)

    def finalize(self, layer: Any) -> None:
        check_finite(layer.weight_scale.data)
        weight, scale = ops.native_fp8(layer.weight.data, self.storage.channel_scales(layer))
        if not self.has_input_scale:
            layer.hold(weight=weight, weight_scale=scale)
            return
        # Merged layers have one x: the largest scale holds the largest of its values.
        input_scale = layer.input_scale.data.max().reshape(1)
        if weight.dtype != layer.weight.dtype:  # as `native_fp8` did to the weight's
            input_scale *= 2
        layer.hold(weight=weight, weight_scale=scale, input_scale=input_scale)


class Fp8BlockMethod(StorageMethod, BlockProduct):
    """A checkpoint's FP8 with a scale for each block of 128 x 128. A last block of outputs that is
    not full is filled up with zeros."""

    storage: Fp8Storage

    def __init__(self, storage: Fp8Storage) -> None:
        super().__init__(storage)
        self.output_unit = BLOCK
        self.input_unit = BLOCK

    def for_shape(self, shape: LinearShape) -> LinearMethod:
        *merged, last = shape.parts.values()
        begins = [block.first % BLOCK for block in (shape.inputs, *merged, last)]
        sizes = [block.size % BLOCK for block in (shape.inputs, *merged)]
        return WidenedMethod(self.storage) if any(begins + sizes) else self

    def finalize(self, layer: Any) -> None:
        weight = layer.weight.data
        missing = -len(weight) % BLOCK
        if missing:
            padding = torch.zeros((missing, weight.shape[1]), dtype=torch.uint8)
            padding = padding.to(weight.device)
            weight = torch.cat((weight.view(torch.uint8), padding)).view(weight.dtype)
        check_finite(layer.weight_scale.data)
        weight, scale = ops.native_fp8(weight, layer.weight_scale.data)
        layer.hold(weight=weight, weight_scale=scale)


class Fp8TensorExperts(StorageMethod, ScaledExperts):
    """Experts of which each tensor has one scale: the codes of gate and up get the larger of
    theirs. x keeps its type."""

    storage: Fp8Storage

    def apply(self, layer: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
        raise NotImplementedError("the experts of a layer are multiplied together")

    def finalize(self, layer: Any) -> None:
        weight = layer.weight.data
        scale = layer.weight_scale.data.max()
        check_finite(scale)
        ratio = self.storage.channel_scales(layer) / scale
        if bool((ratio != 1).any()):
            weight = (weight.float() * ratio[:, None]).to(weight.dtype)
        weight, scale = ops.native_fp8(weight, scale)
        layer.hold(weight=weight, weight_scale=scale)


class Fp8AtLoad(Fp8RowProduct):
    """Quantizes a weight in the compute type as it loads, with a scale for each output."""

    def __init__(self, *, fast_accum: bool = False) -> None:
        self.fast_accum = fast_accum

    def for_shape(self, shape: LinearShape) -> LinearMethod:
        return self if has_whole_rows(shape) else DenseMethod()

    def params(self, shape: LinearShape, dtype: torch.dtype) -> Sequence[ParamSpec]:
        return [ParamSpec(name="weight", dims=(Outputs(), Inputs()), dtype=dtype)]

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        return shape.out_features * (shape.in_features + _SCALE_BYTES)

    def finalize(self, layer: Any) -> None:
        check_finite(layer.weight.data)
        weight, scale = ops.per_token_quant_fp8(layer.weight.data)
        layer.hold(weight=weight, weight_scale=scale.flatten())


class Fp8ExpertsAtLoad(BlockProduct):
    """Quantizes experts in the compute type as they load, with a scale for each block."""

    def params(self, shape: LinearShape, dtype: torch.dtype) -> Sequence[ParamSpec]:
        sizes = [shape.in_features, *shape.sizes]
        if any(size % BLOCK for size in sizes):
            raise ConfigError(
                f"{shape.name}: --quantization fp8 takes experts in blocks of {BLOCK}, they have "
                f"{shape.in_features} inputs and {shape.out_features} outputs on a rank"
            )
        return [ParamSpec(name="weight", dims=(Outputs(), Inputs()), dtype=dtype)]

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        elements = shape.out_features * shape.in_features
        return elements + elements // BLOCK**2 * _SCALE_BYTES

    def finalize(self, layer: Any) -> None:
        weight = layer.weight.data
        check_finite(weight)
        blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scale = blocks.abs().amax(dim=(1, 3)).clamp_(min=_LEAST_SCALE) / _LARGEST
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        weight, scale = ops.native_fp8(codes.view(weight.shape), scale)
        layer.hold(weight=weight, weight_scale=scale)
