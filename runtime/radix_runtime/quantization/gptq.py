"""`quant_method: gptq` of checkpoints: 4 and 8 bits."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from .. import ops
from ..errors import ConfigError
from ..families.names import Rule, Transpose
from .base import LinearMethod
from .codes import (
    Codes,
    CodesMethod,
    CodesStorage,
    codes_method,
    cut_unit,
    from_arguments,
    groups_on_rank,
    reordered,
)
from .config import (
    LayerKind,
    QuantizationConfig,
    Target,
    read_settings,
    require_kernel,
    unquantized,
)
from .names import NameList
from .params import EachPart, Fixed, Inputs, LinearShape, Outputs, ParamSpec
from .storage import WidenableStorage, WidenedMethod

# A byte of zero points in the middle of the codes, as each form stores it.
_MIDDLE = {(4, "gptq"): 0x77, (4, "gptq_v2"): 0x88, (8, "gptq"): 0x7F, (8, "gptq_v2"): 0x80}


class GptqSettings(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of a `quantization_config` of method gptq."""

    bits: int
    group_size: int
    desc_act: bool = False
    lm_head: bool = False
    checkpoint_format: str = "gptq"
    modules_in_block_to_quantize: list[list[str]] | None = None
    dynamic: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class GptqStorage(CodesStorage, WidenableStorage):
    """Words of 32 / bits inputs of an output, zero points packed along the outputs; in the files
    inputs come first.
    `group`: inputs that share a scale, -1 for all. `has_order` (desc_act): the inputs of a group
    are not neighbours, and a rank needs the scales of all groups. `form`: gptq (v1), whose zero
    points are stored less one, or gptq_v2."""

    bits: int
    group: int
    has_order: bool
    form: str

    def __post_init__(self) -> None:
        unit = 32 // self.bits
        object.__setattr__(self, "output_unit", unit)
        object.__setattr__(self, "input_unit", max(unit, cut_unit(max(1, self.group))))

    @property
    def title(self) -> str:
        return f"GPTQ INT{self.bits}"

    @property
    def dropped(self) -> tuple[str, ...]:
        return () if self.has_order else ("g_idx",)

    @property
    def kind(self) -> str:
        return f"int{self.bits}"

    def params(self, shape: LinearShape) -> Sequence[ParamSpec]:
        self.check_cut(shape)
        words = 32 // self.bits
        size = self._size(shape)
        groups = Fixed(-(-shape.inputs.total // size)) if self.has_order else Inputs(size)
        return [
            ParamSpec(name="qweight", dims=(Outputs(), Inputs(words)), dtype=torch.int32),
            ParamSpec(name="qzeros", dims=(Outputs(words), groups), dtype=torch.int32),
            ParamSpec(name="scales", dims=(Outputs(), groups), dtype=torch.float32),
            ParamSpec(name="g_idx", dims=(EachPart(), Inputs()), dtype=torch.int32),
        ]

    def codes(self, layer: Any) -> Codes:
        inputs = layer.shape.inputs
        size = self._size(layer.shape)
        groups = self._groups(layer)
        zeros = layer.qzeros.data
        scales = layer.scales.data
        group = self.group
        count = zeros.shape[1]
        if not bool(((groups >= 0) & (groups < count)).all()):
            raise ValueError(f"has inputs of groups that are none of its {count}")
        if not self.has_order:
            last = inputs.first + inputs.size
            positions = torch.arange(inputs.first, last, device=groups.device)
            if not torch.equal(groups, positions // size - inputs.first // size):
                raise ValueError("has inputs out of order; the configuration says desc_act false")
            if group != -1:
                group, index = groups_on_rank(inputs, size)
                zeros = zeros[:, index]
                scales = scales[:, index]
        found = ops.unpack_gptq(
            layer.qweight.data.T,
            zeros.T.contiguous(),
            scales.T,
            group_size=group,
            bits=self.bits,
            checkpoint_format=self.form,
        )
        codes = from_arguments(found)
        return reordered(codes, groups, size) if self.has_order else codes

    def weight(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        codes = self._unpacked(layer.qweight.data)
        zeros = self._unpacked(layer.qzeros.data.T).T
        if self.form == "gptq":
            zeros = zeros + 1
        groups = self._groups(layer)
        offsets = codes.float() - zeros.float()[:, groups]
        return (offsets * layer.scales.data[:, groups]).to(dtype)

    def _size(self, shape: LinearShape) -> int:
        return shape.inputs.total if self.group == -1 else self.group

    def _groups(self, layer: Any) -> torch.Tensor:
        """The group of each input, among those that this rank has."""
        first = 0 if self.has_order else layer.shape.inputs.first // self._size(layer.shape)
        parts = layer.g_idx.data
        if not bool((parts == parts[0]).all()):
            raise ValueError(
                "has another order of the inputs than the layers that it is merged with"
            )
        return parts[0].long() - first

    def _unpacked(self, words: torch.Tensor) -> torch.Tensor:
        """int32 [R, C] as uint8 [R, C x codes in a word]."""
        data = words.contiguous().view(torch.uint8)
        if self.bits == 8:
            return data
        return torch.stack((data & 15, data >> 4), dim=-1).flatten(1)

    def fill_random(
        self, layer: Any, name: str, memory: torch.Tensor, generator: torch.Generator
    ) -> None:
        if name == "qweight":
            memory.view(torch.uint8).random_(0, 256, generator=generator)
        elif name == "qzeros":
            memory.view(torch.uint8).fill_(_MIDDLE[self.bits, self.form])
        elif name == "scales":
            memory.fill_(0.02 / {4: 4.6, 8: 73.9}[self.bits])
        else:
            inputs = layer.shape.inputs
            positions = torch.arange(inputs.first, inputs.first + inputs.size)
            memory.copy_((positions // self._size(layer.shape)).expand(memory.shape))


class ReorderedMethod(CodesMethod):
    """Of codes whose columns are in another order than the inputs (desc_act). A rank's share of the
    inputs has parts of many groups, which no kernel takes: it is widened."""

    storage: GptqStorage
    packs_experts = False

    def for_shape(self, shape: LinearShape) -> LinearMethod:
        is_cut = shape.inputs.size < shape.inputs.total
        return WidenedMethod(self.storage) if is_cut else self

    def apply(self, layer: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return super().apply(layer, x.index_select(-1, layer.order), **options)


class GptqConfig(QuantizationConfig):
    """Linear layers and experts, and the head where the file says so."""

    def __init__(self, settings: GptqSettings, storage: GptqStorage, target: Target) -> None:
        self._settings = settings
        chosen = settings.modules_in_block_to_quantize
        self._chosen = (
            None if chosen is None else NameList(each for block in chosen for each in block)
        )
        self._storage = storage
        self._target = target

    @classmethod
    def from_checkpoint(cls, raw: Mapping[str, Any], target: Target) -> QuantizationConfig:
        settings = read_settings(raw, GptqSettings)
        if settings.bits not in (4, 8):
            raise ConfigError(
                f"quantization_config: gptq of {settings.bits} bits is not supported: 4 and 8"
            )
        if settings.checkpoint_format not in ("gptq", "gptq_v2"):
            form = settings.checkpoint_format
            raise ConfigError(
                f"quantization_config: checkpoint_format {form!r} is not supported: gptq, gptq_v2"
            )
        for rule in settings.dynamic or {}:
            if not rule.startswith("-:"):
                raise ConfigError(
                    f"quantization_config: dynamic {rule!r} is not supported: layers can be left "
                    "out (-:), not be of other bits"
                )
        require_kernel(target, "GPTQ", f"int{settings.bits}")
        storage = GptqStorage(
            bits=settings.bits,
            group=settings.group_size,
            has_order=settings.desc_act and settings.group_size != -1,
            form=settings.checkpoint_format,
        )
        return cls(settings, storage, target)

    def names(self) -> Sequence[Rule]:
        """Outputs first, as in every other format."""
        return [Transpose(r"\.(qweight|qzeros|scales)$")]

    def may_be_left_over(self, name: str) -> bool:
        """AutoGPTQ gives every layer a bias."""
        return name.endswith(".bias")

    def method_of(self, name: str, kind: LayerKind) -> LinearMethod:
        is_head = kind is LayerKind.HEAD and self._settings.lm_head
        if not (kind.is_product or is_head) or self._is_left_out(name, kind):
            return unquantized(kind)
        if self._storage.has_order and kind is LayerKind.EXPERT and not self._target.is_cpu:
            return WidenedMethod(self._storage)  # each expert has an order of its own
        if self._storage.has_order:
            return ReorderedMethod(self._storage)
        return codes_method(self._storage, self._target)

    def _is_left_out(self, name: str, kind: LayerKind) -> bool:
        skipped = (rule.removeprefix("-:") for rule in self._settings.dynamic or {})
        if any(re.match(rule, name) for rule in skipped):
            return True
        if self._chosen is None or kind is LayerKind.HEAD:
            return False
        return name not in self._chosen
