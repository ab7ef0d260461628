"""`quant_method: compressed-tensors` of checkpoints: FP8 on GPUs and, widened, on the CPU; INT8
with activations in INT8, and other integers of 8 and 4 bits, on both."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from ..errors import ConfigError
from ..families.names import Drop, Rule
from .base import LinearMethod
from .codes import CodesStorage, codes_method
from .config import LayerKind, QuantizationConfig, Target, read_settings, unquantized
from .fp8 import Fp8Storage, Scales
from .fp8_config import fp8_method
from .int8_products import w8a8_method
from .names import NameList
from .packed_int import Int8Storage, PackedIntStorage

# What makes the method of a layer of a group.
MakeMethod = Callable[[LayerKind, Target], LinearMethod]

_LINEAR = "Linear"  # a target that is the class of all layers that multiply
_SUPPORTED = (
    "float-quantized FP8 (tensor, channel, block), int-quantized INT8 and pack-quantized INT4 and "
    "INT8"
)


class QuantizationArgs(msgspec.Struct, kw_only=True, frozen=True):
    """How numbers are quantized: of weights or of activations."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | str | None = None
    dynamic: bool | str = False
    actorder: str | bool | None = None

    @property
    def granularity(self) -> str:
        """`strategy`, or what leaving it out stands for."""
        if self.strategy == "group" or (self.strategy is None and self.group_size is not None):
            return "channel" if self.group_size == -1 else "group"
        return self.strategy or "tensor"

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs of a block; former files have it as `128x128`."""
        if isinstance(self.block_structure, str):
            rows, _, columns = self.block_structure.partition("x")
            return (int(rows), int(columns)) if rows.isdigit() and columns.isdigit() else (0, 0)
        return self.block_structure or (0, 0)


class Group(msgspec.Struct, kw_only=True, frozen=True):
    """Layers that are quantized alike: `targets` names them, by pattern or as a class."""

    targets: list[str]
    weights: QuantizationArgs | None = None
    input_activations: QuantizationArgs | None = None
    format: str | None = None


class CompressedTensorsSettings(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of a `quantization_config` of method compressed-tensors."""

    config_groups: dict[str, Group]
    format: str | None = None
    ignore: list[str] = []
    sparsity_config: dict[str, Any] = {}
    transform_config: dict[str, Any] = {}


class CompressedTensorsConfig(QuantizationConfig):
    """The method of each group, and which layers are in it."""

    def __init__(
        self,
        groups: Sequence[tuple[Group, MakeMethod]],
        ignored: Sequence[str],
        target: Target,
    ) -> None:
        self._groups = groups
        self._ignored = NameList(ignored)
        self._target = target

    @classmethod
    def from_checkpoint(cls, raw: Mapping[str, Any], target: Target) -> QuantizationConfig:
        settings = read_settings(raw, CompressedTensorsSettings)
        if settings.sparsity_config or settings.transform_config.get("config_groups"):
            raise ConfigError("quantization_config: sparsity and transforms are not supported")
        groups = []
        for name, group in settings.config_groups.items():
            if group.weights is None:
                raise ConfigError(f"quantization_config: {name} says nothing of weights")
            form = group.format or settings.format or ""
            groups.append((group, _make_method(name, group, group.weights, form)))
        return cls(groups, settings.ignore, target)

    def names(self) -> Sequence[Rule]:
        """Sizes follow from the model; the scales of the KV cache are not used."""
        return [Drop(r"\.weight_shape$"), Drop(r"\.(k|v)_(scale|zero_point)$")]

    def method_of(self, name: str, kind: LayerKind) -> LinearMethod:
        if name in self._ignored:
            return unquantized(kind)
        make = self._group_of(name, kind)
        return unquantized(kind) if make is None else make(kind, self._target)

    def _group_of(self, name: str, kind: LayerKind) -> MakeMethod | None:
        """A group that names the layer comes before one that names its class."""
        for group, make in self._groups:
            if any(_is_name_of(target, name) for target in group.targets):
                return make
        is_linear = kind.is_product or kind is LayerKind.HEAD
        for group, make in self._groups:
            if is_linear and _LINEAR in group.targets:
                return make
        return None


def _is_name_of(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target == name


def _make_method(name: str, group: Group, weights: QuantizationArgs, form: str) -> MakeMethod:
    """How the weights of a group are held. Raises ConfigError where that is not supported."""
    inputs = group.input_activations
    if form in ("float-quantized", "naive-quantized") and weights.type == "float":
        fp8 = _fp8(weights, inputs)
        if fp8 is not None:
            return partial(fp8_method, fp8)
    codes: CodesStorage | None = None
    if form in ("int-quantized", "naive-quantized") and weights.type == "int":
        codes = _int8(weights, inputs)
    elif form == "pack-quantized" and weights.type == "int" and inputs is None:
        codes = _packed(weights)
    if isinstance(codes, Int8Storage) and codes.quantizes_x:
        return partial(w8a8_method, codes)
    if codes is not None:
        return lambda kind, target: codes_method(codes, target)
    x = "as it is" if inputs is None else f"{inputs.type} of {inputs.num_bits} bits"
    raise ConfigError(
        f"quantization_config: {name} ({form}, {weights.type} of {weights.num_bits} bits by "
        f"{weights.granularity}, activations {x}) is not supported; there are: {_SUPPORTED}"
    )


def _fp8(weights: QuantizationArgs, inputs: QuantizationArgs | None) -> Fp8Storage | None:
    scales = {each.value: each for each in Scales}.get(weights.granularity)
    if weights.num_bits != 8 or not weights.symmetric or scales is None:
        return None
    is_8_bit = inputs is None or (inputs.type == "float" and inputs.num_bits == 8)
    if not is_8_bit:
        return None
    has_input_scale = False
    if inputs is not None and not inputs.dynamic:
        if scales is Scales.BLOCK or inputs.granularity != "tensor":
            return None
        has_input_scale = True
    if scales is Scales.BLOCK and min(weights.block) <= 0:
        return None
    return Fp8Storage(scales=scales, block=weights.block, has_input_scale=has_input_scale)


def _int8(weights: QuantizationArgs, inputs: QuantizationArgs | None) -> CodesStorage | None:
    if weights.num_bits != 8 or not weights.symmetric:
        return None
    if weights.granularity not in ("channel", "tensor", "group"):
        return None
    if inputs is not None:
        is_by_token = inputs.type == "int" and inputs.num_bits == 8 and inputs.dynamic is True
        if not is_by_token or not inputs.symmetric or weights.granularity == "group":
            return None
    return Int8Storage(
        group=weights.group_size if weights.granularity == "group" else None,
        per_tensor=weights.granularity == "tensor",
        quantizes_x=inputs is not None,
    )


def _packed(weights: QuantizationArgs) -> CodesStorage | None:
    is_supported = weights.num_bits == 4 or (weights.num_bits == 8 and weights.symmetric)
    if not is_supported or weights.granularity not in ("channel", "group"):
        return None
    if weights.actorder in ("group", True):
        return None
    return PackedIntStorage(
        bits=weights.num_bits,
        group=weights.group_size if weights.granularity == "group" else None,
        symmetric=weights.symmetric,
    )
