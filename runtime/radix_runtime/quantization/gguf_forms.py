"""How the codes of a GGUF file are held: bits, groups, super-blocks, and what has room
for tensors of several types."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from .. import ops
from .mxfp4 import (
    RANDOM_EXPONENT,
    check_exponent,
    half_powers,
    packed_bytes,
    twice_the_floats,
)
from .params import Block

SUPER = 256  # inputs of a super-block
_OUTPUTS = 16  # what the wheel pads packed weights to
_LINE = 64  # bytes, which it pads a super-block of so many outputs to
_NUMBER = 2  # bytes of a scale or minimum of a super-block
_DEVIATION = 0.02  # of random weights
_SMALL = 32  # every small scale and minimum of random weights


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeForm:
    """How codes are held: `bits` 4 (two to a byte) or 8, a scale for `group` inputs, and with
    `has_mins` a number that is added. `is_wide`: both are float32, not float16.

    `in_supers`: scales and minima are float16 for each 256 inputs, times small integers for each
    group; `bits` is 4 (two to a byte), 5 or 6 then, and codes of 6 are -32 .. 31.

    `is_float`: codes are floats of 4 bits (two to a byte), and scales powers of two in 8."""

    bits: int
    group: int
    has_mins: bool = False
    is_wide: bool = False
    in_supers: bool = False
    is_float: bool = False

    def join(self, other: "CodeForm") -> "CodeForm":
        """A form that holds the codes of both."""
        if self == other:
            return self
        if self.in_supers != other.in_supers or self.is_float != other.is_float:
            return self.plain().join(other.plain())
        return CodeForm(
            bits=max(self.bits, other.bits),
            group=min(self.group, other.group),
            has_mins=self.has_mins or other.has_mins,
            # A minimum in place of a zero point is no float16.
            is_wide=not self.in_supers,
            in_supers=self.in_supers,
        )

    def plain(self) -> "CodeForm":
        """The form of integers whose groups have scales and minima of their own: products and
        powers, which are exact in float32."""
        if self.is_float:
            return CodeForm(bits=8, group=self.group, is_wide=True)
        if not self.in_supers:
            return self
        bits = 4 if self.bits == 4 else 8
        return replace(self, bits=bits, is_wide=True, in_supers=False)

    @property
    def kind(self) -> str:
        """The kind of `ops.pack_weight` that multiplies it where it is not plain."""
        return "mxfp4" if self.is_float else f"q{self.bits}_k"

    @property
    def widths(self) -> dict[str, int]:
        """The parameters, and how many inputs an element of each stands for."""
        number = SUPER if self.in_supers else self.group
        found = {"weight": 2 if self.bits == 4 else 1, "weight_scale": number}
        if self.has_mins:
            found["weight_min"] = number
        if self.in_supers:
            found["weight_sub_scale"] = self.group
        if self.in_supers and self.has_mins:
            found["weight_sub_min"] = self.group
        return found

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The parameters' types."""
        numbers = torch.float32 if self.is_wide else torch.float16
        if self.is_float:
            numbers = torch.uint8
        return {
            "weight": torch.uint8 if self.bits == 4 else torch.int8,
            "weight_scale": numbers,
            "weight_min": numbers,
            "weight_sub_scale": torch.int8,
            "weight_sub_min": torch.uint8,
        }

    def held_bytes(self, out_features: int, in_features: int) -> int:
        """What a weight that is not plain takes once it is packed."""
        if self.is_float:
            return packed_bytes(out_features, in_features)
        of_one = SUPER * self.bits // 8
        of_one += (SUPER // self.group + _NUMBER) * (2 if self.has_mins else 1)
        padded = -(-_OUTPUTS * of_one // _LINE) * _LINE
        return -(-out_features // _OUTPUTS) * -(-in_features // SUPER) * padded

    def fill_random(self, name: str, memory: torch.Tensor, generator: torch.Generator) -> None:
        """Values for a parameter where no file is read."""
        count = 1 << self.bits
        least = -count // 2 if self.bits in (6, 8) else 0
        scale = _DEVIATION / (count / 12**0.5)
        center = least + (count - 1) / 2 if self.has_mins else 0
        if self.in_supers:
            scale /= _SMALL
        if name == "weight_scale" and self.is_float:
            memory.fill_(RANDOM_EXPONENT)
        elif name == "weight" and self.bits in (5, 6):
            memory.random_(least, least + count, generator=generator)
        elif name == "weight":
            memory.view(torch.uint8).random_(0, 256, generator=generator)
        elif name in ("weight_sub_scale", "weight_sub_min"):
            memory.fill_(_SMALL)
        else:
            memory.fill_(scale if name == "weight_scale" else -center * scale)


FORMS = {
    "Q4_0": CodeForm(bits=4, group=32),
    "Q4_1": CodeForm(bits=4, group=32, has_mins=True),
    "Q5_0": CodeForm(bits=8, group=32),
    "Q5_1": CodeForm(bits=8, group=32, has_mins=True),
    "Q8_0": CodeForm(bits=8, group=32),
    "Q4_K": CodeForm(bits=4, group=32, has_mins=True, in_supers=True),
    "Q5_K": CodeForm(bits=5, group=32, has_mins=True, in_supers=True),
    "Q6_K": CodeForm(bits=6, group=16, in_supers=True),
    "MXFP4": CodeForm(bits=4, group=32, is_float=True),
}


def in_form(found: ops.GgufArguments, form: CodeForm) -> dict[str, torch.Tensor]:
    """The parameters of some rows, in a form that has room for them: in super-blocks if it is.
    Raises ValueError for powers of two with which weights are not finite."""
    codes = found["w"]
    scales = found["scales"]
    mins = found["mins"]
    if found["kind"] == "mxfp4":
        check_exponent(int(scales.max()))
    if found["kind"] == "mxfp4" and not form.is_float:
        codes = twice_the_floats(codes)
        scales = half_powers(scales)
    is_paired = found["kind"] in ("int4", "q4_k")
    has_zero_points = found["kind"] == "int4" and mins is None  # all of them are 8
    if is_paired and form.bits > 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).view(torch.int8)
        if has_zero_points:
            codes = codes - 8
            has_zero_points = False
    if form.has_mins and mins is None:
        mins = scales.float() * (-8 if has_zero_points else 0)
    repeats = found["group"] // form.group
    numbers = {"weight_scale": scales, "weight_min": mins}
    small_mins = found["sub_mins"]
    if found["sub_scales"] is not None and small_mins is None:
        small_mins = torch.zeros(found["sub_scales"].shape, dtype=torch.uint8)
    small = {"weight_sub_scale": found["sub_scales"], "weight_sub_min": small_mins}
    by_group = small if form.in_supers else numbers
    values = {"weight": codes}
    for name, part in (numbers | small).items():
        if name not in form.widths or part is None:
            continue
        count = repeats if name in by_group else 1
        values[name] = part.to(form.dtypes[name]).repeat_interleave(count, 1)
    return values


def without_supers(
    parts: Mapping[str, torch.Tensor], inputs: Block, group: int
) -> dict[str, torch.Tensor]:
    """A rank's parameters with a scale and a minimum for each group, float32. `inputs`: those of
    the rank, which may begin and end within a super-block."""
    if "weight_sub_scale" not in parts:
        return dict(parts)
    starts = torch.arange(inputs.first, inputs.first + inputs.size, group)
    supers = starts // SUPER - inputs.first // SUPER
    found = {"weight": parts["weight"]}
    for name in ("scale", "min"):
        if f"weight_{name}" in parts:
            numbers = parts[f"weight_{name}"].float()[:, supers]
            found[f"weight_{name}"] = numbers * parts[f"weight_sub_{name}"]
    return found
