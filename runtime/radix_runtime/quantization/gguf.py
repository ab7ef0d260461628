"""GGUF files: on the CPU the codes of a file are kept, elsewhere they are widened as they load.

A product that merges tensors of several types (`attn_v` often has more bits than `attn_q`) is held
in a form that has room for all of them: 8 bits for 4, the smaller groups, minima. No code is
rounded."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from .. import ops
from ..errors import ConfigError
from ..families.names import Named, Rule
from ..families.tensor_views import TensorSource
from .base import LinearMethod
from .config import LayerKind, QuantizationConfig, Target, read_settings, unquantized
from .dense import DenseMethod
from .gguf_tensors import GgufTensor, UnpackedTensor, unpack_blocks
from .params import Inputs, LinearShape, Outputs, ParamSpec

# Tensors that layers merge: their names, but for the letters in which they differ, are equal.
_MERGED = re.compile(r"attn_[qkv]$|ffn_(gate|up)(?=_exps$|_shexp$|$|\.\d+$)")
# Tiny matrices that decide which experts run: files hold them as floats, or should.
_ROUTERS = re.compile(r"ffn_gate_inp(_shexp)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeForm:
    """How codes are held: `bits` 4 (two to a byte) or 8, a scale for `group` inputs, and with
    `has_mins` a number that is added. `is_wide`: both are float32, not float16."""

    bits: int
    group: int
    has_mins: bool = False
    is_wide: bool = False

    def join(self, other: "CodeForm") -> "CodeForm":
        """A form that holds the codes of both."""
        if self == other:
            return self
        return CodeForm(
            bits=max(self.bits, other.bits),
            group=min(self.group, other.group),
            has_mins=self.has_mins or other.has_mins,
            is_wide=True,  # a minimum in place of a zero point is no float16
        )

    @property
    def scale_dtype(self) -> torch.dtype:
        """The type of scales and minima."""
        return torch.float32 if self.is_wide else torch.float16

    @property
    def widths(self) -> dict[str, int]:
        """The parameters, and how many inputs an element of each stands for."""
        found = {"weight": 8 // self.bits, "weight_scale": self.group}
        return found | ({"weight_min": self.group} if self.has_mins else {})


_FORMS = {
    "Q4_0": CodeForm(bits=4, group=32),
    "Q4_1": CodeForm(bits=4, group=32, has_mins=True),
    "Q5_0": CodeForm(bits=8, group=32),
    "Q5_1": CodeForm(bits=8, group=32, has_mins=True),
    "Q8_0": CodeForm(bits=8, group=32),
    "Q4_K": CodeForm(bits=4, group=32, has_mins=True, is_wide=True),
    "Q5_K": CodeForm(bits=8, group=32, has_mins=True, is_wide=True),
    "Q6_K": CodeForm(bits=8, group=16, is_wide=True),
    "MXFP4": CodeForm(bits=8, group=32, is_wide=True),
}


class GgufSettings(msgspec.Struct, kw_only=True, frozen=True):
    """`types`: the type of each quantized tensor, by its name in the file without `.weight`."""

    quant_method: str
    types: dict[str, str]


class GgufMethod(DenseMethod):
    """Multiplies by the codes of the file. `quantizes_x`: x is quantized too, with a scale for each
    group, as llama.cpp does; never where the compute type is float32."""

    quantizes_x = True

    def __init__(self, form: CodeForm) -> None:
        self.form = form
        self.input_unit = form.group

    def params(self, shape: LinearShape, dtype: torch.dtype) -> Sequence[ParamSpec]:
        form = self.form
        if not shape.inputs.is_cut_at(form.group):
            raise ConfigError(
                f"{shape.name}: {shape.inputs.size} of {shape.inputs.total} inputs on a rank are "
                f"no whole groups of {form.group}; a smaller --tp-size cuts it less"
            )
        codes = torch.uint8 if form.bits == 4 else torch.int8
        return [
            ParamSpec(
                name=name,
                dims=(Outputs(), Inputs(per)),
                dtype=codes if name == "weight" else form.scale_dtype,
            )
            for name, per in form.widths.items()
        ]

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        return LinearMethod.held_bytes(self, shape, dtype)  # codes, scales and minima

    def finalize(self, layer: Any) -> None:
        scales = layer.weight_scale.data
        mins = layer.weight_min.data if self.form.has_mins else None
        for name, values in (("scale", scales), ("minimum", mins)):
            if values is not None and not bool(values.isfinite().all()):
                raise ValueError(f"has a {name} that is not finite")
        kind = "int4" if self.form.bits == 4 else "int8"
        if self.quantizes_x and layer.compute_dtype != torch.float32:
            kind = {"int4": "w4a8", "int8": "w8a8"}[kind]
        weight = ops.pack_weight(
            layer.weight.data,
            scales,
            kind,
            mins=mins,
            group=self.form.group,
            dtype=layer.compute_dtype,
        )
        layer.hold(weight=weight)

    def fill_random(
        self, layer: Any, name: str, memory: torch.Tensor, generator: torch.Generator
    ) -> None:
        spread = 4.6 if self.form.bits == 4 else 74  # the deviation of random codes
        if name == "weight":
            memory.view(torch.uint8).random_(0, 256, generator=generator)
        elif name == "weight_scale":
            memory.fill_(0.02 / spread)
        else:
            memory.fill_(-7.5 * 0.02 / spread if self.form.bits == 4 else 0)


class WidenedGguf(DenseMethod):
    """The weight in the compute type, where no kernel takes the codes."""

    widens = "GGUF"


class GgufConfig(QuantizationConfig):
    """Every product whose tensors are quantized in the file."""

    def __init__(self, types: Mapping[str, str], target: Target) -> None:
        self._types = types
        self._forms: dict[str, CodeForm] = {}
        if not target.is_cpu:
            return
        joined: dict[str, CodeForm] = {}
        for name, kind in types.items():
            product = _MERGED.sub("merged", name)
            joined[product] = joined.get(product, _FORMS[kind]).join(_FORMS[kind])
        for name in types:
            if not _ROUTERS.search(name):
                self._forms[name] = joined[_MERGED.sub("merged", name)]

    @classmethod
    def from_checkpoint(cls, raw: Mapping[str, Any], target: Target) -> QuantizationConfig:
        return cls(read_settings(raw, GgufSettings).types, target)

    def names(self) -> Sequence[Rule]:
        """A tensor of codes becomes what its layer holds."""
        return [_SplitCodes(self._forms)]

    def method_of(self, name: str, kind: LayerKind) -> LinearMethod:
        form = self._forms.get(name)
        if form is not None:
            return GgufMethod(form)
        is_widened = name in self._types and kind.is_product
        return WidenedGguf() if is_widened else unquantized(kind)


@dataclass(frozen=True, slots=True)
class _SplitCodes:
    """One tensor as codes, scales and, where its form has them, minima."""

    forms: Mapping[str, CodeForm]

    def apply(self, name: str, source: TensorSource) -> Iterator[Named]:
        """Rule.apply."""
        layer = name.removesuffix(".weight")
        form = self.forms.get(layer)
        if form is None or not isinstance(source, GgufTensor):
            yield name, source
            return

        def unpack(blocks: Any, kind: str) -> dict[str, torch.Tensor]:
            return _in_form(unpack_blocks(blocks, kind), form)

        unpacked = UnpackedTensor(source, unpack=unpack, widths=form.widths)
        for part, view in unpacked.sources.items():
            yield f"{layer}.{part}", view


def _in_form(found: ops.GgufArguments, form: CodeForm) -> dict[str, torch.Tensor]:
    """Codes, scales and minima of some rows, in a form that has room for them."""
    codes = found["w"]
    scales = found["scales"]
    mins = found["mins"]
    has_zero_points = found["kind"] == "int4" and mins is None  # all of them are 8
    if found["kind"] == "int4" and form.bits == 8:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).view(torch.int8)
        if has_zero_points:
            codes = codes - 8
            has_zero_points = False
    if form.has_mins and mins is None:
        mins = scales.float() * (-8 if has_zero_points else 0)
    repeats = found["group"] // form.group
    values = {"weight": codes, "weight_scale": scales.to(form.scale_dtype)}
    if mins is not None:
        values["weight_min"] = mins.to(form.scale_dtype)
    return {
        name: part if name == "weight" else part.repeat_interleave(repeats, 1)
        for name, part in values.items()
    }
