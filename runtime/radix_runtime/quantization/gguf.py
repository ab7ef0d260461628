"""GGUF files: the codes of a file are kept, or widened as they load on a GPU without a kernel.

A product that merges tensors of several types (`attn_v` often has more bits than `attn_q`) is held
in a form that has room for all of them (`gguf_forms.py`). No code is rounded."""

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
from .config import (
    LayerKind,
    QuantizationConfig,
    Target,
    read_settings,
    unquantized,
)
from .dense import DenseMethod, padded_bytes
from .gguf_forms import FORMS, SUPER, CodeForm, in_form, without_supers
from .gguf_tensors import GgufTensor, UnpackedTensor
from .params import Inputs, LinearShape, Outputs, ParamSpec

# Tensors that layers merge: their names, but for the letters in which they differ, are equal.
_MERGED = re.compile(r"attn_[qkv]$|ffn_(gate|up)(?=_exps$|_shexp$|$|\.\d+$)")
# Tiny matrices that decide which experts run: files hold them as floats, or should.
_ROUTERS = re.compile(r"ffn_gate_inp(_shexp)?$")


class GgufSettings(msgspec.Struct, kw_only=True, frozen=True):
    """`types`: the type of each quantized tensor, by its name in the file without `.weight`."""

    quant_method: str
    types: dict[str, str]


class GgufMethod(DenseMethod):
    """Multiplies by the codes of the file. `rounds_x`: x is quantized too, with a scale for each
    group or super-block, as llama.cpp does: on the CPU, but for float32. `quantizes_x`: False turns
    that off."""

    quantizes_x = True
    packs_experts = True

    def __init__(self, form: CodeForm, *, rounds_x: bool) -> None:
        self.form = form
        self.rounds_x = rounds_x
        self.input_unit = form.group
        self.kind = form.kind if form.is_float or form.in_supers else self._plain_kind()

    def params(self, shape: LinearShape, dtype: torch.dtype) -> Sequence[ParamSpec]:
        form = self.form
        if not shape.inputs.is_cut_at(form.group):
            raise ConfigError(
                f"{shape.name}: {shape.inputs.size} of {shape.inputs.total} inputs on a rank are "
                f"no whole groups of {form.group}; a smaller --tp-size cuts it less"
            )
        return [
            ParamSpec(name=name, dims=(Outputs(), Inputs(per)), dtype=form.dtypes[name])
            for name, per in form.widths.items()
        ]

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        if self._keeps_form(shape):
            return self.form.held_bytes(shape.out_features, shape.in_features)
        of_file = LinearMethod.held_bytes(self, shape, dtype)  # codes, scales and minima
        return padded_bytes(of_file, shape)

    def finalize(self, layer: Any) -> None:
        parts = {name: getattr(layer, name).data for name in self.form.widths}
        for name, values in parts.items():
            if values.is_floating_point() and not bool(values.isfinite().all()):
                what = "minimum" if name == "weight_min" else "scale"
                raise ValueError(f"has a {what} that is not finite")
        kind = self.form.kind
        if not self._keeps_form(layer.shape):
            parts = without_supers(parts, layer.shape.inputs, self.form.group)
            kind = self._plain_kind()
        weight = ops.pack_weight(
            parts["weight"],
            parts["weight_scale"],
            kind,
            mins=parts.get("weight_min"),
            sub_scales=parts.get("weight_sub_scale"),
            sub_mins=parts.get("weight_sub_min"),
            group=self.form.group,
            dtype=layer.compute_dtype,
        )
        layer.hold(weight=weight)

    def _plain_kind(self) -> str:
        rounded, exact = ("w4a8", "int4") if self.form.bits == 4 else ("w8a8", "int8")
        return rounded if self.rounds_x and self.quantizes_x else exact

    def _keeps_form(self, shape: LinearShape) -> bool:
        """Whether the form is not plain, and stays so in memory: a rank may have a part of a
        super-block."""
        is_whole = self.form.in_supers and shape.inputs.is_cut_at(SUPER)
        return self.form.is_float or is_whole

    def fill_random(
        self, layer: Any, name: str, memory: torch.Tensor, generator: torch.Generator
    ) -> None:
        self.form.fill_random(name, memory, generator)


class WidenedGguf(DenseMethod):
    """The weight in the compute type, where no kernel takes the codes."""

    widens = "GGUF"


class GgufConfig(QuantizationConfig):
    """Every product whose tensors are quantized in the file."""

    def __init__(self, types: Mapping[str, str], target: Target) -> None:
        self._types = types
        self._forms: dict[str, CodeForm] = {}
        self._rounds_x = target.is_cpu and target.dtype != torch.float32
        if not target.is_cpu and not ops.has_triton():  # it alone takes groups of 16 and minima
            return
        joined: dict[str, CodeForm] = {}
        for name, kind in types.items():
            product = _MERGED.sub("merged", name)
            form = FORMS[kind]
            # The CPU's other kinds round x; a GPU has no super-blocks.
            is_plain = target.dtype == torch.float32 if target.is_cpu else not form.is_float
            if is_plain:
                form = form.plain()
            joined[product] = joined.get(product, form).join(form)
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
            return GgufMethod(form, rounds_x=self._rounds_x)
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
            found = ops.unpack_gguf(blocks, kind, in_super_blocks=form.in_supers)
            return in_form(found, form)

        unpacked = UnpackedTensor(source, unpack=unpack, widths=form.widths)
        for part, view in unpacked.sources.items():
            yield f"{layer}.{part}", view
