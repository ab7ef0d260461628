"""`quant_method: mxfp4` of checkpoints, in which gpt-oss has its experts: 4-bit floats (e2m1) in
blocks of 32 inputs, each with a power of two (e8m0), as the OCP's microscaling formats define them.

Twice such a float is an integer from -12 to 12: the CPU multiplies x in 8 bits by integers, which
it looks up as it reads the floats' codes, and every weight keeps its value. With float32 as the
compute type x is not rounded: the integers are held then. A GPU multiplies x as it is by the
floats; without a kernel there the weights are widened."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from .. import ops
from ..errors import ConfigError
from ..families.names import Named, Rule
from ..families.tensor_views import Flattened, TensorSource, TensorView
from .base import LinearMethod
from .codes import Codes, CodesMethod, CodesStorage
from .config import (
    LayerKind,
    QuantizationConfig,
    Target,
    has_kernel,
    read_settings,
    unquantized,
)
from .dense import padded_bytes
from .names import NameList
from .params import Inputs, LinearShape, Outputs, ParamSpec
from .storage import WidenableStorage, WidenedMethod

BLOCK = 32  # inputs that share a power of two
_BYTES = BLOCK // 2  # of a block's floats
# What the CPU's wheel pads packed weights to: outputs, inputs, and bytes of the scales of so many
# outputs.
_OUTPUTS = 16
_PADDED = 64
_LINE = 64

# Twice the float of each 4-bit code, which has a bit of sign, two of exponent, one of mantissa.
_TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)

_NAN = 255  # the one e8m0 code that is no power of two
_LARGEST = 252  # 2^125: with a larger power 6, the largest float, is no float32
RANDOM_EXPONENT = 120  # 2^-7: the floats of random codes deviate by 2.9


@dataclass(frozen=True)
class Mxfp4Storage(CodesStorage, WidenableStorage):
    """`blocks`: two codes to a byte, the first input in the low half. `scales`: e8m0, the exponent
    plus 127."""

    input_unit = BLOCK

    @property
    def title(self) -> str:
        return "MXFP4"

    @property
    def kind(self) -> str:
        return "int8"  # twice the floats

    def params(self, shape: LinearShape) -> Sequence[ParamSpec]:
        total = shape.inputs.total
        if total % BLOCK:
            raise ConfigError(f"{shape.name}: {total} inputs are no whole MXFP4 blocks of {BLOCK}")
        in_blocks = Inputs(BLOCK, width=_BYTES)
        return [
            ParamSpec(name="blocks", dims=(Outputs(), in_blocks), dtype=torch.uint8),
            ParamSpec(name="scales", dims=(Outputs(), Inputs(BLOCK)), dtype=torch.uint8),
        ]

    def codes(self, layer: Any) -> Codes:
        scales = half_powers(layer.scales.data)
        return Codes(
            w=twice_the_floats(layer.blocks.data),
            scales=scales.to(torch.bfloat16),  # exact, as every power of two from 2^-133
            kind="int8",
            zeros=None,
            group=BLOCK,
        )

    def weight(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        inputs = layer.shape.inputs
        first = inputs.first % BLOCK
        doubled = twice_the_floats(layer.blocks.data).float().unflatten(1, (-1, BLOCK))
        blocks = doubled * half_powers(layer.scales.data)[..., None]
        return blocks.flatten(1)[:, first : first + inputs.size].to(dtype)

    def fill_random(
        self, layer: Any, name: str, memory: torch.Tensor, generator: torch.Generator
    ) -> None:
        if name == "blocks":
            memory.random_(0, 256, generator=generator)
        else:
            memory.fill_(RANDOM_EXPONENT)


class Mxfp4Method(CodesMethod):
    """Multiplies by the floats as they are in the file or, with `holds_integers`, by twice the
    floats, integers held in 8 bits."""

    storage: Mxfp4Storage

    def __init__(self, storage: Mxfp4Storage, *, holds_integers: bool) -> None:
        super().__init__(storage)
        self.holds_integers = holds_integers
        self.kind = "int8" if holds_integers else "mxfp4"

    def params(self, shape: LinearShape, dtype: torch.dtype) -> Sequence[ParamSpec]:
        self.storage.check_cut(shape)
        return super().params(shape, dtype)

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        """As in the checkpoint, padded; of integers a byte for each weight, and scales of 16
        bits."""
        if self.holds_integers:
            weights = shape.out_features * shape.in_features
            return padded_bytes(weights + weights // BLOCK * 2, shape)
        return packed_bytes(shape.out_features, shape.in_features)

    def finalize(self, layer: Any) -> None:
        if self.holds_integers:
            super().finalize(layer)
            return
        weight = ops.pack_weight(
            layer.blocks.data, layer.scales.data, self.kind, group=BLOCK, dtype=layer.compute_dtype
        )
        layer.hold(weight=weight)


class Mxfp4Settings(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of a `quantization_config` of method mxfp4."""

    modules_to_not_convert: list[str] = []


class Mxfp4Config(QuantizationConfig):
    """Experts, but for those that are listed as left out."""

    def __init__(self, ignored: Sequence[str], target: Target) -> None:
        self._ignored = NameList(ignored)
        self._target = target

    @classmethod
    def from_checkpoint(cls, raw: Mapping[str, Any], target: Target) -> QuantizationConfig:
        return cls(read_settings(raw, Mxfp4Settings).modules_to_not_convert, target)

    def names(self) -> Sequence[Rule]:
        """The experts of a layer are in one tensor, which has a dimension for the blocks."""
        sizes = ("experts", "outputs", "blocks")
        return (
            _ExpertTensor(kind="blocks", sizes=(*sizes, _BYTES), view=Flattened),
            _ExpertTensor(kind="scales", sizes=sizes, view=_Exponents),
        )

    def method_of(self, name: str, kind: LayerKind) -> LinearMethod:
        if kind is not LayerKind.EXPERT or name in self._ignored:
            return unquantized(kind)
        storage = Mxfp4Storage()
        if not has_kernel(self._target, "mxfp4"):
            return WidenedMethod(storage)
        # The CPU's kernel of 4-bit floats rounds x.
        in_float32 = self._target.dtype == torch.float32
        return Mxfp4Method(storage, holds_integers=self._target.is_cpu and in_float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpertTensor:
    """The tensors `*_{kind}` of experts through a view. `sizes` names their dimensions; a number is
    what one must have."""

    kind: str
    sizes: Sequence[str | int]
    view: type[TensorView]

    def apply(self, name: str, source: TensorSource) -> Iterator[Named]:
        """Rule.apply."""
        if re.search(rf"\.experts\.\w+_{self.kind}$", name) is None:
            yield name, source
            return
        shape = source.get_shape()
        has_sizes = len(shape) == len(self.sizes) and all(
            isinstance(size, str) or size == found
            for size, found in zip(self.sizes, shape, strict=True)
        )
        if not has_sizes:
            expected = ", ".join(map(str, self.sizes))
            raise ValueError(f"has shape {shape}, expected [{expected}]")
        yield name, self.view(source)


class _Exponents(TensorView):
    """Exponents of which every weight is finite: checked where they are read, so that an error can
    name the tensor of the file."""

    def get_shape(self) -> list[int]:
        return self._source.get_shape()

    def read(self, ranges: list[slice]) -> torch.Tensor:
        found: torch.Tensor = self._source[tuple(ranges)]
        if found.dtype == torch.uint8:  # another type is the loader's error
            check_exponent(int(found.max()))
        return found


def check_exponent(largest: int) -> None:
    """Raises ValueError for the largest exponent of a tensor, plus 127, where it makes weights that
    are not finite."""
    if largest == _NAN:
        raise ValueError(f"has a scale of {_NAN}, which is NaN")
    if largest > _LARGEST:
        raise ValueError(f"has a scale of {largest}, with which 6 is too large for float32")


def packed_bytes(out_features: int, in_features: int) -> int:
    """What a weight of 4-bit floats takes once it is packed."""
    inputs = -(-in_features // _PADDED) * _PADDED
    codes = _OUTPUTS * inputs // 2
    scales = -(-_OUTPUTS * inputs // BLOCK // _LINE) * _LINE
    return -(-out_features // _OUTPUTS) * (codes + scales)


def _pairs() -> torch.Tensor:
    """Twice the two floats of each byte, the low half first, as one word: int16 [256]."""
    values = torch.arange(256)
    pairs = torch.stack((_TWICE[values & 15], _TWICE[values >> 4]), dim=1)
    return pairs.view(torch.int16).flatten()


_PAIRS = _pairs()


def twice_the_floats(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K / 2] as int8 [N, K]."""
    words = _PAIRS.to(blocks.device).index_select(0, blocks.flatten().int())
    return words.view(torch.int8).view(len(blocks), -1)


def half_powers(exponents: torch.Tensor) -> torch.Tensor:
    """Half of what e8m0 codes, uint8, stand for, float32."""
    # By their bits, since a power on a GPU may be rounded; the least two are subnormal.
    codes = exponents.int()
    bits = torch.where(codes < 2, (1 << 21) << codes.clamp(max=1), (codes - 1) << 23)
    return bits.view(torch.float32)
