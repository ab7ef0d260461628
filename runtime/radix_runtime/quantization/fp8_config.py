"""`quant_method: fp8` of checkpoints, as DeepSeek, Qwen and transformers write it, and
`--quantization fp8`."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from ..errors import ConfigError
from ..families.names import Rename, Rule
from .at_load import AtLoad
from .base import LinearMethod
from .config import (
    LayerKind,
    QuantizationConfig,
    Target,
    has_kernel,
    read_settings,
    require_kernel,
    unquantized,
)
from .fp8 import BLOCK, Fp8Storage, Scales
from .fp8_packed import Fp8PackedAtLoad, Fp8PackedMethod
from .fp8_products import (
    Fp8AtLoad,
    Fp8BlockMethod,
    Fp8ExpertsAtLoad,
    Fp8RowMethod,
    Fp8TensorExperts,
)
from .names import NameList
from .storage import WidenedMethod

_FORMATS = ("e4m3", "float8_e4m3fn")  # two names of one


class Fp8Settings(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of a `quantization_config` of method fp8."""

    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, int] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    fmt: str = "e4m3"


class Fp8Config(QuantizationConfig):
    """FP8 in blocks, or with a scale for each tensor. What is not listed as left out is FP8, except
    the vocabulary matrices and routers."""

    def __init__(self, storage: Fp8Storage, ignored: Sequence[str], target: Target) -> None:
        self._storage = storage
        self._ignored = NameList(ignored)
        self._target = target

    @classmethod
    def from_checkpoint(cls, raw: Mapping[str, Any], target: Target) -> QuantizationConfig:
        settings = read_settings(raw, Fp8Settings)
        if settings.fmt not in _FORMATS:
            raise ConfigError(f"quantization_config: fmt {settings.fmt!r} is not supported: e4m3")
        if settings.activation_scheme not in ("dynamic", "static"):
            scheme = settings.activation_scheme
            raise ConfigError(f"quantization_config: activation_scheme {scheme!r} is unknown")
        ignored = (settings.modules_to_not_convert or []) + (settings.ignored_layers or [])
        if settings.weight_block_size is None:
            has_input_scale = settings.activation_scheme == "static"
            storage = Fp8Storage(scales=Scales.TENSOR, has_input_scale=has_input_scale)
        else:
            storage = Fp8Storage(
                scales=Scales.BLOCK, block=settings.weight_block_size, suffix="weight_scale_inv"
            )
        return cls(storage, ignored, target)

    @classmethod
    def at_load(cls, name: str, target: Target) -> QuantizationConfig:
        return Fp8FromFloats.at_load(name, target)

    def names(self) -> Sequence[Rule]:
        """Scales of whole tensors have two names."""
        if self._storage.scales is not Scales.TENSOR:
            return ()
        return (
            Rename(r"\.weight_scale_inv$", ".weight_scale"),
            Rename(r"\.activation_scale$", ".input_scale"),
        )

    def method_of(self, name: str, kind: LayerKind) -> LinearMethod:
        if not kind.is_product or name in self._ignored:
            return unquantized(kind)
        return fp8_method(self._storage, kind, self._target)


def fp8_method(storage: Fp8Storage, kind: LayerKind, target: Target) -> LinearMethod:
    """What multiplies FP8 weights on this target."""
    if target.is_cpu and has_kernel(target, "fp8"):
        return Fp8PackedMethod(storage)
    if target.is_cpu or target.dtype == torch.float32:
        return WidenedMethod(storage)
    if storage.scales is Scales.BLOCK:
        is_taken = storage.block == (BLOCK, BLOCK)
        return Fp8BlockMethod(storage) if is_taken else WidenedMethod(storage)
    if kind is not LayerKind.EXPERT:
        return Fp8RowMethod(storage, fast_accum=target.fp8_fast_accum)
    if storage.scales is Scales.TENSOR:
        return Fp8TensorExperts(storage)
    return WidenedMethod(storage)  # no kernel takes experts with a scale for each output


class Fp8FromFloats(AtLoad):
    """`--quantization fp8`: a scale for each output; on GPUs of experts for each block of 128 x
    128. The vocabulary matrix keeps the compute type."""

    def __init__(self, target: Target) -> None:
        self._is_cpu = target.is_cpu
        self._fast_accum = target.fp8_fast_accum

    @classmethod
    def at_load(cls, name: str, target: Target) -> QuantizationConfig:
        if target.is_cpu:
            require_kernel(target, f"--quantization {name}", "fp8")
        elif target.dtype == torch.float32:
            raise ConfigError(
                f"--quantization {name} goes with --dtype bfloat16 or float16 on a GPU, not with "
                "float32"
            )
        return cls(target)

    def linear(self) -> LinearMethod:
        return Fp8PackedAtLoad() if self._is_cpu else Fp8AtLoad(fast_accum=self._fast_accum)

    def method_of(self, name: str, kind: LayerKind) -> LinearMethod:
        if kind is LayerKind.EXPERT and not self._is_cpu:
            return Fp8ExpertsAtLoad()
        return super().method_of(name, kind)
