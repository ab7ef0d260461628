"""How a weight in toy4 is held and multiplied: in plain torch, on any device.

weight[n, k] = (code - 8) * scale of the block of 16 outputs and 32 inputs that (n, k) is in."""

from collections.abc import Sequence
from typing import Any

import torch

from radix_runtime.errors import ConfigError
from radix_runtime.quantization.base import LinearMethod
from radix_runtime.quantization.params import Inputs, LinearShape, Outputs, ParamSpec

CODES_IN_WORD = 8
BLOCK_OUTPUTS = 16
BLOCK_INPUTS = 32
_MIDDLE = 8


class Toy4Method(LinearMethod):
    """The codes stay packed in memory and are widened for each product."""

    # Ranks cut at blocks; experts whose width they do not divide so are split by expert.
    output_unit = BLOCK_OUTPUTS
    input_unit = BLOCK_INPUTS

    def params(self, shape: LinearShape, dtype: torch.dtype) -> Sequence[ParamSpec]:
        parts = list(shape.parts.values())
        is_whole = all(part.is_cut_at(BLOCK_OUTPUTS) for part in parts)
        if not is_whole or not shape.inputs.is_cut_at(BLOCK_INPUTS):
            raise ConfigError(f"{shape.name} is cut inside of a block of toy4")
        codes = ParamSpec(name="codes", dims=(Outputs(), Inputs(CODES_IN_WORD)), dtype=torch.int32)
        scales = ParamSpec(
            name="block_scales",
            dims=(Outputs(BLOCK_OUTPUTS), Inputs(BLOCK_INPUTS)),
            dtype=torch.float16,
        )
        return [codes, scales]

    def finalize(self, layer: Any) -> None:
        scales = layer.block_scales.data
        if not bool(scales.isfinite().all()):
            raise ValueError("has a scale that is not finite")
        layer.hold(codes=layer.codes.data, block_scales=scales)

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
        result = x.float() @ self._weight(layer).T
        if bias is not None:
            result += bias
        if residual is not None:
            result += residual
        return result.to(out_dtype or x.dtype)

    def fill_random(
        self, layer: Any, name: str, memory: torch.Tensor, generator: torch.Generator
    ) -> None:
        if name == "codes":
            memory.view(torch.uint8).random_(0, 256, generator=generator)
        else:
            memory.fill_(0.02 / 4.6)  # the deviation of the codes

    def _weight(self, layer: Any) -> torch.Tensor:
        """float32 [out_features, in_features]."""
        data = layer.codes.data.view(torch.uint8)
        codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(1)
        values = codes[:, : layer.shape.in_features].float() - _MIDDLE
        rows = []
        before = 0
        for part in layer.shape.parts.values():  # the last block of a part may not be full
            blocks = -(-part.size // BLOCK_OUTPUTS)
            scales = layer.block_scales[before : before + blocks].float()
            rows.append(scales.repeat_interleave(BLOCK_OUTPUTS, 0)[: part.size])
            before += blocks
        scales = torch.cat(rows).repeat_interleave(BLOCK_INPUTS, 1)
        return values * scales[:, : layer.shape.in_features]
