"""QuantizationConfig: which method holds a layer, by the layer's name and kind."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import msgspec
import torch

from .. import ops
from ..errors import ConfigError
from ..families.names import Rule
from .base import LinearMethod
from .dense import DenseMethod, PlainMethod

Settings = TypeVar("Settings", bound=msgspec.Struct)


class LayerKind(Enum):
    """What a weight is for."""

    LINEAR = "linear"
    EXPERT = "expert"
    ROUTER = "router"  # which experts run hangs on small differences
    HEAD = "head"
    TIED_HEAD = "tied head"  # an embedding that is the head too
    EMBEDDING = "embedding"

    @property
    def is_product(self) -> bool:
        """Whether it is a product inside of a layer, which every format quantizes."""
        return self in (LayerKind.LINEAR, LayerKind.EXPERT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a model runs on, and its compute type. `fp8_fast_accum`: sums of FP8 products with a
    scale for each output may stay in the tensor cores, which keep some 14 bits of them."""

    device: torch.device
    dtype: torch.dtype
    fp8_fast_accum: bool = False

    @property
    def is_cpu(self) -> bool:
        """Whether it is the CPU."""
        return self.device.type == "cpu"


class QuantizationConfig(ABC):
    """The format of a model's weights: which method each layer gets. A name in the registry leads
    to a subclass, which says what it can be made from: the `quantization_config` of a checkpoint,
    the name alone (`--quantization`, which quantizes as it loads), or both."""

    @classmethod
    def from_checkpoint(cls, raw: Mapping[str, Any], target: Target) -> "QuantizationConfig":
        """By the `quantization_config` of a checkpoint. Raises ConfigError for settings that are
        not supported, or not on this target."""
        raise ConfigError(f"quant_method {raw.get('quant_method')!r} is no format of checkpoints")

    @classmethod
    def at_load(cls, name: str, target: Target) -> "QuantizationConfig":
        """Of weights in the compute type, which it quantizes as they load. Raises ConfigError."""
        raise ConfigError(
            f"--quantization {name}: the checkpoint is not quantized, and this format is none that "
            "quantizes as it loads"
        )

    def names(self) -> Sequence[Rule]:
        """Name rules of this format's tensors, which come before those of the model's family."""
        return ()

    def may_be_left_over(self, name: str) -> bool:
        """Whether writers of this format add tensors of such names that a model has no place for:
        they are passed over where all of their elements are 0."""
        return False

    @abstractmethod
    def method_of(self, name: str, kind: LayerKind) -> LinearMethod:
        """The method of a layer of the checkpoint, by its name there. Raises ConfigError where no
        method of this target can hold it."""

    def method_for(self, names: Sequence[str], kind: LayerKind) -> LinearMethod:
        """The method of a layer that merges those of these names, which must be held alike. Raises
        ConfigError."""
        methods = [self.method_of(name, kind) for name in names]
        for name, method in zip(names, methods, strict=True):
            if method != methods[0]:
                raise ConfigError(
                    f"the formats of {names[0]} and {name} differ: they cannot be one product"
                )
        return methods[0]


def has_kernel(target: Target, kind: str) -> bool:
    """Whether something multiplies x of the compute type by weights of a kind of `ops.pack_weight`
    there."""
    return _kernel(target, kind)[0] not in ("none", "reference")


def _kernel(target: Target, kind: str) -> tuple[str, str]:
    """(what multiplies, why that)."""
    dtype = str(target.dtype).removeprefix("torch.")
    return ops.weight_kernel(kind, target.device.type, dtype)


def require_kernel(target: Target, name: str, kind: str) -> None:
    """Raises ConfigError, with what would run, for a format whose weights, of that kind of
    `ops.pack_weight`, nothing multiplies there."""
    if has_kernel(target, kind):
        return
    device = target.device.type
    _, why = _kernel(target, kind)
    if target.is_cpu:
        raise ConfigError(
            f"{name} has no kernel on the CPU here ({why}): the wheel radix-kernels-cpu has; "
            "without it checkpoints in bfloat16, float16 and float32 run"
        )
    raise ConfigError(
        f"{name} has no kernel on {device} ({why}), only on the CPU (--device cpu); {device} takes "
        "checkpoints in bfloat16 and float16, FP8 ones (fp8, compressed-tensors of 8-bit floats), "
        f"INT8 ones with activations in INT8 (compressed-tensors W8A8){_integers_of(target)}"
    )


def _integers_of(target: Target) -> str:
    """What is said of formats of few bits on a GPU."""
    if has_kernel(target, "int4"):
        return (
            " and weights of 4 and 8 bits (awq, gptq, pack-quantized compressed-tensors, mxfp4, "
            "GGUF files, --quantization int4 and int8)"
        )
    return "; with Triton installed it also takes weights of 4 and 8 bits"


def read_settings(raw: Mapping[str, Any], kind: type[Settings]) -> Settings:
    """The keys of a `quantization_config` that a format understands. Raises ConfigError, naming the
    key of a wrong type."""
    given = {key: value for key, value in raw.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"quantization_config: {error}") from None


def unquantized(kind: LayerKind) -> LinearMethod:
    """The method of a layer that is not quantized."""
    return PlainMethod() if kind is LayerKind.EMBEDDING else DenseMethod()


class Unquantized(QuantizationConfig):
    """All weights in the compute type."""

    @classmethod
    def at_load(cls, name: str, target: Target) -> "QuantizationConfig":
        return cls()

    def method_of(self, name: str, kind: LayerKind) -> LinearMethod:
        return unquantized(kind)
