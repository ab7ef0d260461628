"""How files hold FP8 weights (e4m3): with a scale for each block, each output or the whole
tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from .params import Block, Dim, EachPart, Fixed, Inputs, LinearShape, Outputs, ParamSpec
from .storage import WidenableStorage

_WIDENED_ROWS = 1024  # in pieces: no second copy of a large weight in float32
BLOCK = 128  # outputs and inputs that share a scale in the kernels
_GROUPS = (128, 64, 32, 16)  # of `ops.pack_weight`, the cheapest first


class Scales(Enum):
    """What a scale of the weight is for."""

    BLOCK = "block"
    CHANNEL = "channel"
    TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True)
class Fp8Storage(WidenableStorage):
    """weight = codes x scale. `block`: outputs and inputs that share a scale, of Scales.BLOCK.
    `suffix`: the scales' name in the files. `has_input_scale`: x has a scale of its own there."""

    scales: Scales
    block: tuple[int, int] = (BLOCK, BLOCK)
    suffix: str = "weight_scale"
    has_input_scale: bool = False

    @property
    def title(self) -> str:
        return "FP8"

    def params(self, shape: LinearShape) -> Sequence[ParamSpec]:
        dims: dict[Scales, tuple[Dim, ...]] = {
            Scales.BLOCK: (Outputs(self.block[0]), Inputs(self.block[1])),
            Scales.CHANNEL: (Outputs(), Fixed(1)),
            Scales.TENSOR: (EachPart(),),
        }
        codes = ParamSpec(name="weight", dims=(Outputs(), Inputs()), dtype=torch.float8_e4m3fn)
        scales = ParamSpec(
            name="weight_scale", dims=dims[self.scales], dtype=torch.float32, suffix=self.suffix
        )
        if not self.has_input_scale:
            return [codes, scales]
        of_input = ParamSpec(name="input_scale", dims=(EachPart(),), dtype=torch.float32)
        return [codes, scales, of_input]

    def weight(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        codes = layer.weight.data
        scales = self._output_scales(layer)
        result = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        for start in range(0, len(codes), _WIDENED_ROWS):
            rows = slice(start, start + _WIDENED_ROWS)
            scale = scales[rows]
            if self.scales is Scales.BLOCK:
                scale = self._spread_over_inputs(scale, layer.shape.inputs)
            result[rows] = codes[rows].float() * scale
        return result

    def _spread_over_inputs(self, scale: torch.Tensor, inputs: Block) -> torch.Tensor:
        """Scales of blocks of inputs [N, blocks] as those of inputs, [N, in_features]."""
        per = self.block[1]
        offset = inputs.first % per
        return scale.repeat_interleave(per, 1)[:, offset : offset + inputs.size]

    def _output_scales(self, layer: Any) -> torch.Tensor:
        """The scales of each output, float32 [out_features, blocks of inputs, or 1]."""
        scale: torch.Tensor = layer.weight_scale.data
        if self.scales is Scales.CHANNEL:
            return scale
        rows = []
        before = 0
        for block in layer.shape.parts.values():
            if self.scales is Scales.TENSOR:
                rows.append(scale[before].expand(block.size, 1))
                before += 1
                continue
            units = block.units(self.block[0])
            of_part = scale[before : before + units.size].repeat_interleave(self.block[0], 0)
            offset = block.first % self.block[0]
            rows.append(of_part[offset : offset + block.size])
            before += units.size
        return torch.cat(rows)

    def input_group(self, inputs: Block) -> int | None:
        """How many of a rank's inputs share a scale, of the sizes that `ops.pack_weight` has and of
        which every block has whole ones; 0: all of them. None: blocks are cut across all sizes."""
        if self.scales is not Scales.BLOCK:
            return 0
        size = self.block[1]
        if inputs.units(size).size == 1:
            return 0
        fitting = [group for group in _GROUPS if not (size % group or inputs.first % group)]
        return fitting[0] if fitting else None

    def group_scales(self, layer: Any, group: int) -> torch.Tensor:
        """The scales of each output, float32 [out_features, groups of `group` inputs]; as
        `input_group` has them."""
        scales = self._output_scales(layer)
        if not group:
            return scales
        inputs = layer.shape.inputs
        starts = torch.arange(inputs.first, inputs.first + inputs.size, group)
        return scales[:, starts // self.block[1] - inputs.first // self.block[1]]

    def channel_scales(self, layer: Any) -> torch.Tensor:
        """A scale for each output, float32 [out_features]; not of Scales.BLOCK."""
        return self._output_scales(layer).flatten()

    def fill_random(
        self, layer: Any, name: str, memory: torch.Tensor, generator: torch.Generator
    ) -> None:
        if name == "weight":
            values = torch.empty(memory.shape, dtype=torch.bfloat16, device=memory.device)
            memory.copy_(values.normal_(0, 32, generator=generator))
        elif name == "weight_scale":
            memory.fill_(0.02 / 32)
        else:
            memory.fill_(0.02)  # x up to 9
