"""`quant_method: awq` of checkpoints: 4 bits."""

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
    CodesStorage,
    codes_method,
    cut_unit,
    from_arguments,
    groups_on_rank,
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
from .params import Inputs, LinearShape, Outputs, ParamSpec

_PER_WORD = 8


class AwqSettings(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of a `quantization_config` of method awq; `w_bit` and `q_group_size` are AutoAWQ's
    own names."""

    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    zero_point: bool = True
    version: str = "gemm"
    modules_to_not_convert: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class AwqStorage(CodesStorage):
    """Words of 8 outputs of an input, in AWQ's order of them; in the files inputs come first.
    `group`: inputs that share a scale
    and a zero point, -1 for all."""

    group: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_unit", _PER_WORD)
        object.__setattr__(self, "input_unit", 1 if self.group == -1 else cut_unit(self.group))

    @property
    def title(self) -> str:
        return "AWQ"

    @property
    def kind(self) -> str:
        return "int4"

    def params(self, shape: LinearShape) -> Sequence[ParamSpec]:
        self.check_cut(shape)
        group = Inputs(shape.inputs.total if self.group == -1 else self.group)
        words = Outputs(_PER_WORD)
        return [
            ParamSpec(name="qweight", dims=(words, Inputs()), dtype=torch.int32),
            ParamSpec(name="qzeros", dims=(words, group), dtype=torch.int32),
            ParamSpec(name="scales", dims=(Outputs(), group), dtype=torch.float32),
        ]

    def codes(self, layer: Any) -> Codes:
        zeros = layer.qzeros.data
        scales = layer.scales.data
        group = self.group
        if group != -1:
            group, index = groups_on_rank(layer.shape.inputs, group)
            zeros = zeros[:, index]
            scales = scales[:, index]
        found = ops.unpack_awq(layer.qweight.data.T, zeros.T, scales.T, group_size=group)
        return from_arguments(found)

    def fill_random(
        self, layer: Any, name: str, memory: torch.Tensor, generator: torch.Generator
    ) -> None:
        if name == "qweight":
            memory.view(torch.uint8).random_(0, 256, generator=generator)
        elif name == "qzeros":
            memory.view(torch.uint8).fill_(0x88)
        else:
            memory.fill_(0.02 / 4.6)  # the deviation of the codes


class AwqConfig(QuantizationConfig):
    """Linear layers and experts that are not listed as left out."""

    def __init__(self, storage: AwqStorage, ignored: Sequence[str], target: Target) -> None:
        self._storage = storage
        self._ignored = NameList(ignored)
        self._target = target

    @classmethod
    def from_checkpoint(cls, raw: Mapping[str, Any], target: Target) -> QuantizationConfig:
        require_kernel(target, "AWQ", "int4")
        settings = read_settings(raw, AwqSettings)
        bits = settings.bits or settings.w_bit
        if bits != 4:
            raise ConfigError(f"quantization_config: awq of {bits} bits is not supported: 4")
        if settings.version.lower() != "gemm":
            raise ConfigError(
                f"quantization_config: awq of version {settings.version!r} is not supported: gemm"
            )
        if not settings.zero_point:
            raise ConfigError("quantization_config: awq without zero_point is not supported")
        group = settings.group_size or settings.q_group_size
        if group is None:
            raise ConfigError("quantization_config: group_size is missing")
        return cls(AwqStorage(group=group), settings.modules_to_not_convert or [], target)

    def names(self) -> Sequence[Rule]:
        """Outputs first, as in every other format."""
        return [Transpose(r"\.(qweight|qzeros|scales)$")]

    def method_of(self, name: str, kind: LayerKind) -> LinearMethod:
        if not kind.is_product or name in self._ignored:
            return unquantized(kind)
        return codes_method(self._storage, self._target)
