"""How the codes of GGUF tensors are held: every type in every form that has room for it."""

from __future__ import annotations

import itertools

import gguf
import numpy as np
import pytest
import torch

from radix_runtime import ops
from radix_runtime.quantization.gguf_forms import FORMS, CodeForm, in_form, without_supers
from radix_runtime.quantization.params import Block
from tests.runtime.gguf_files import random_blocks

SUPER_TYPES = ("Q4_K", "Q5_K", "Q6_K")


def some_blocks(kind: str, rows: int, inputs: int) -> np.ndarray:
    return random_blocks(kind, (rows, inputs), np.random.default_rng(len(kind) + rows))


def packed(parts: dict[str, torch.Tensor], kind: str, group: int) -> ops.PackedWeight:
    return ops.pack_weight(
        parts["weight"],
        parts["weight_scale"],
        kind,
        mins=parts.get("weight_min"),
        sub_scales=parts.get("weight_sub_scale"),
        sub_mins=parts.get("weight_sub_min"),
        group=group,
        dtype=torch.float32,
    )


def elements(weight: ops.PackedWeight) -> torch.Tensor:
    return ops.embedding(torch.arange(weight.n), weight)


@pytest.mark.parametrize("kind", SUPER_TYPES)
@pytest.mark.parametrize("other", SUPER_TYPES)
def test_joined_super_blocks_keep_every_element(kind: str, other: str) -> None:
    form = FORMS[kind].join(FORMS[other])
    assert form.in_supers and form == FORMS[other].join(FORMS[kind])
    blocks = some_blocks(kind, 5, 512)
    parts = in_form(ops.unpack_gguf(blocks, kind, in_super_blocks=True), form)
    assert {name: form.dtypes[name] for name in parts} == {
        name: part.dtype for name, part in parts.items()
    }
    assert list(parts) == [name for name in form.widths if name in parts]
    assert {name: 512 // width for name, width in form.widths.items()} == {
        name: part.shape[1] for name, part in parts.items()
    }
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    weight = packed(parts, form.kind, form.group)
    assert torch.equal(elements(weight), torch.from_numpy(expected))
    assert weight.nbytes == form.held_bytes(5, 512)


@pytest.mark.parametrize("kind", SUPER_TYPES)
def test_a_part_of_a_super_block(kind: str) -> None:
    """A rank's inputs may begin and end within one: then groups have scales of their own."""
    form = FORMS[kind]
    blocks = some_blocks(kind, 5, 1024)
    whole = in_form(ops.unpack_gguf(blocks, kind, in_super_blocks=True), form)
    inputs = Block(total=1024, first=384, size=448)
    parts = {}
    for name, width in form.widths.items():
        units = inputs.units(width)
        parts[name] = whole[name][:, units.first : units.first + units.size]
    flat = without_supers(parts, inputs, form.group)
    assert set(flat) == set(form.plain().widths)
    weight = packed(flat, "int4" if form.bits == 4 else "int8", form.group)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])[:, 384:832]
    assert torch.equal(elements(weight), torch.from_numpy(np.ascontiguousarray(expected)))


def test_floats_become_integers_beside_other_types() -> None:
    values = np.random.default_rng(3).normal(0, 1, (5, 512)).astype(np.float32)
    blocks = gguf.quantize(values, gguf.GGMLQuantizationType.MXFP4)
    expected = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4))
    alone = FORMS["MXFP4"]
    weight = packed(in_form(ops.unpack_gguf(blocks, "MXFP4"), alone), alone.kind, alone.group)
    assert torch.equal(elements(weight), expected)
    assert weight.nbytes == alone.held_bytes(5, 512)
    for other in ("Q8_0", "Q4_1", "Q4_K", "Q6_K"):
        form = alone.join(FORMS[other])
        assert form == FORMS[other].join(alone) and not form.is_float and form.bits == 8
        parts = in_form(ops.unpack_gguf(blocks, "MXFP4"), form)
        assert torch.equal(elements(packed(parts, "int8", form.group)), expected)


def test_a_power_that_is_nan() -> None:
    blocks = np.zeros((3, 34), dtype=np.uint8)
    blocks[1, 17] = 255
    found = ops.unpack_gguf(blocks, "MXFP4")
    for form in (FORMS["MXFP4"], FORMS["MXFP4"].plain()):
        with pytest.raises(ValueError, match="has a scale of 255, which is NaN"):
            in_form(found, form)


def test_types_without_super_blocks_have_room_for_others() -> None:
    for kind, other in itertools.product(SUPER_TYPES, ("Q4_0", "Q8_0", "Q5_1")):
        form = FORMS[kind].join(FORMS[other])
        assert not form.in_supers and form.is_wide
        assert form.bits == max(FORMS[kind].plain().bits, FORMS[other].bits)
        assert form.has_mins == (FORMS[kind].has_mins or FORMS[other].has_mins)


@pytest.mark.parametrize(
    "form", [*FORMS.values(), FORMS["Q4_K"].join(FORMS["Q6_K"])], ids=[*FORMS, "Q4_K+Q6_K"]
)
def test_random_weights(form: CodeForm) -> None:
    """About as wide as random weights in floats, and centered within half a code."""
    generator = torch.Generator().manual_seed(1)
    parts = {}
    for name, width in form.widths.items():
        parts[name] = torch.empty(64, 1024 // width, dtype=form.dtypes[name])
        form.fill_random(name, parts[name], generator)
    kind = {4: "int4", 8: "int8"}.get(form.bits, form.kind)
    if form.in_supers or form.is_float:
        kind = form.kind
    values = elements(packed(parts, kind, form.group))
    bound = 4e-3 if form.is_float else 1e-3  # a power of two cannot be chosen closer
    assert abs(values.std() - 0.02) < bound and abs(values.mean()) < 3e-3
