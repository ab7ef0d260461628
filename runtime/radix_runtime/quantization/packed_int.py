"""How compressed-tensors holds integer weights: int8 as they are, or words of 4 or 8-bit codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .codes import Codes, CodesStorage, compact, cut_unit, groups_on_rank, regrouped
from .params import Dim, EachPart, Fixed, Inputs, LinearShape, Outputs, ParamSpec
from .storage import WidenableStorage

_WIDENED_ROWS = 1024  # in pieces: no second copy of a large weight in float32


def scale_dims(group: int | None, *, per_tensor: bool) -> tuple[Dim, ...]:
    """Of a scale for each `group` inputs of an output, for each output (None) or for all."""
    if per_tensor:
        return (EachPart(),)
    return (Outputs(), Fixed(1) if group is None else Inputs(group))


def spread_over_outputs(scale: torch.Tensor, shape: LinearShape) -> torch.Tensor:
    """Scales of whole parts [parts] as those of outputs [out_features, 1]; others stay."""
    if scale.dim() > 1:
        return scale
    sizes = torch.tensor(shape.sizes, device=scale.device)
    return scale.repeat_interleave(sizes)[:, None]


@dataclass(frozen=True, kw_only=True)
class Int8Storage(CodesStorage, WidenableStorage):
    """int-quantized: int8 codes. `group`: inputs that share a scale, None for all of an output;
    `per_tensor`: all of the tensor."""

    group: int | None = None
    per_tensor: bool = False
    quantizes_x: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_unit", cut_unit(self.group or 1))

    @property
    def title(self) -> str:
        return "INT8"

    @property
    def kind(self) -> str:
        return "w8a8" if self.quantizes_x else "int8"

    def params(self, shape: LinearShape) -> Sequence[ParamSpec]:
        self.check_cut(shape)
        dims = scale_dims(self.group, per_tensor=self.per_tensor)
        return [
            ParamSpec(name="weight", dims=(Outputs(), Inputs()), dtype=torch.int8),
            ParamSpec(name="weight_scale", dims=dims, dtype=torch.float32),
        ]

    def codes(self, layer: Any) -> Codes:
        scales = compact(spread_over_outputs(layer.weight_scale.data, layer.shape))
        group = 0
        if self.group is not None:
            group, index = groups_on_rank(layer.shape.inputs, self.group)
            scales = scales[:, index]
        codes = Codes(w=layer.weight.data, scales=scales, kind="int8", zeros=None, group=group)
        return regrouped(codes, layer.shape.in_features)

    def channel_scales(self, layer: Any) -> torch.Tensor:
        """A scale for each output, float32 [out_features]; not of groups."""
        return spread_over_outputs(layer.weight_scale.data, layer.shape).flatten()

    def weight(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        codes = layer.weight.data
        scales = self.channel_scales(layer)[:, None]
        result = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        for start in range(0, len(codes), _WIDENED_ROWS):
            rows = slice(start, start + _WIDENED_ROWS)
            result[rows] = codes[rows].float() * scales[rows]
        return result

    def fill_random(
        self, layer: Any, name: str, memory: torch.Tensor, generator: torch.Generator
    ) -> None:
        if name == "weight":
            memory.random_(-127, 128, generator=generator)
        else:
            memory.fill_(0.02 / 73)  # the deviation of the codes


@dataclass(frozen=True, kw_only=True)
class PackedIntStorage(CodesStorage):
    """pack-quantized: 32 / bits codes of one output in a word, plus half of their range, the first
    in the lowest bits. `group`: as Int8Storage. `symmetric`: all zero points are in the middle;
    others are packed along the outputs (4 bits alone)."""

    bits: int
    group: int | None
    symmetric: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_unit", max(self._per_word, cut_unit(self.group or 1)))

    @property
    def title(self) -> str:
        return f"INT{self.bits}"

    @property
    def kind(self) -> str:
        return f"int{self.bits}"

    @property
    def _per_word(self) -> int:
        return 32 // self.bits

    def params(self, shape: LinearShape) -> Sequence[ParamSpec]:
        per_word = self._per_word
        self.check_cut(shape)
        words = ParamSpec(
            name="weight_packed", dims=(Outputs(), Inputs(per_word)), dtype=torch.int32
        )
        scales = ParamSpec(
            name="weight_scale",
            dims=scale_dims(self.group, per_tensor=False),
            dtype=torch.float32,
        )
        specs = [words, scales]
        if not self.symmetric:
            by_group = scale_dims(self.group, per_tensor=False)[1]
            zeros = ParamSpec(
                name="weight_zero_point",
                dims=(Outputs(per_word), by_group),
                dtype=torch.int32,
            )
            specs.append(zeros)
        return specs

    def codes(self, layer: Any) -> Codes:
        shape = layer.shape
        k = shape.in_features
        data = layer.weight_packed.data.contiguous().view(torch.uint8)
        scales = compact(layer.weight_scale.data)
        zeros = self._zeros(layer)
        group = 0
        if self.group is not None:
            group, index = groups_on_rank(shape.inputs, self.group)
            scales = scales[:, index]
            zeros = None if zeros is None else zeros[:, index]
        if self.bits == 8:
            w = (data[:, :k] ^ 128).view(torch.int8)
            codes = Codes(w=w, scales=scales, kind="int8", zeros=None, group=group)
        else:
            w = data[:, : -(-k // 2)].contiguous()
            codes = Codes(w=w, scales=scales, kind="int4", zeros=zeros, group=group)
        return regrouped(codes, k)

    def _zeros(self, layer: Any) -> torch.Tensor | None:
        if self.symmetric:
            return None
        words = layer.weight_zero_point.data.T.contiguous().view(torch.uint8)
        by_output = torch.stack((words & 15, words >> 4), dim=-1).flatten(1).T
        rows = []
        before = 0
        for block in layer.shape.parts.values():
            first = before * self._per_word + block.first % self._per_word
            rows.append(by_output[first : first + block.size])
            before += block.units(self._per_word).size
        return torch.cat(rows).contiguous()

    def fill_random(
        self, layer: Any, name: str, memory: torch.Tensor, generator: torch.Generator
    ) -> None:
        if name == "weight_scale":
            deviation = {4: 4.6, 8: 73.0}[self.bits]
            memory.fill_(0.02 / deviation)
        elif name == "weight_packed":
            memory.view(torch.uint8).random_(0, 256, generator=generator)
        else:
            memory.fill_(-0x77777778)  # of zero points: 8 in every 4 bits
