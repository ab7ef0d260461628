"""What `radix doctor` says that a weight of codes will take, beside what a packed one takes: of
shares that are no whole tiles of a kernel too."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from radix_runtime.quantization.awq import AwqStorage
from radix_runtime.quantization.base import LinearMethod
from radix_runtime.quantization.codes import CodesMethod
from radix_runtime.quantization.gguf import GgufMethod
from radix_runtime.quantization.gguf_forms import FORMS
from radix_runtime.quantization.gptq import GptqStorage
from radix_runtime.quantization.mxfp4 import Mxfp4Method, Mxfp4Storage
from radix_runtime.quantization.packed_int import Int8Storage, PackedIntStorage
from radix_runtime.quantization.params import Block, LinearShape

METHODS: dict[str, LinearMethod] = {
    "awq": CodesMethod(AwqStorage(group=32)),
    "gptq": CodesMethod(GptqStorage(bits=4, group=32, has_order=False, form="gptq")),
    "gptq int8": CodesMethod(GptqStorage(bits=8, group=-1, has_order=False, form="gptq")),
    "ct int4": CodesMethod(PackedIntStorage(bits=4, group=32)),
    "ct int4 zeros": CodesMethod(PackedIntStorage(bits=4, group=32, symmetric=False)),
    "ct int8": CodesMethod(Int8Storage()),
    "mxfp4": Mxfp4Method(Mxfp4Storage(), holds_integers=False),
    "mxfp4 as int8": Mxfp4Method(Mxfp4Storage(), holds_integers=True),
    "Q4_0": GgufMethod(FORMS["Q4_0"], rounds_x=True),
    "Q4_1": GgufMethod(FORMS["Q4_1"], rounds_x=False),
    "Q8_0": GgufMethod(FORMS["Q8_0"], rounds_x=True),
    "Q6_K": GgufMethod(FORMS["Q6_K"], rounds_x=True),
}


def held(method: LinearMethod, shape: LinearShape) -> int:
    """What a layer of random codes holds."""
    found: dict[str, Any] = {}
    layer = types.SimpleNamespace(
        shape=shape, compute_dtype=torch.bfloat16, is_stacked=False, hold=found.update
    )
    generator = torch.Generator().manual_seed(5)
    for spec in method.params(shape, torch.bfloat16):
        memory = torch.empty(spec.shape_on_rank(shape), dtype=spec.dtype)
        method.fill_random(layer, spec.name, memory, generator)
        if memory.is_floating_point():
            memory.fill_(2**-8)  # 16 bits hold it
        setattr(layer, spec.name, torch.nn.Parameter(memory, requires_grad=False))
    method.finalize(layer)
    return sum(value.nbytes for value in found.values())


@pytest.mark.parametrize(("outputs", "inputs"), [(2048, 96), (1024, 160), (4096, 512), (40, 2048)])
@pytest.mark.parametrize("name", METHODS)
def test_shares_of_any_width(name: str, outputs: int, inputs: int) -> None:
    shape = LinearShape(
        name="layer", inputs=Block.whole(inputs), parts={None: Block.whole(outputs)}
    )
    method = METHODS[name]
    foretold = method.held_bytes(shape, torch.bfloat16)
    actual = held(method, shape)
    assert 0.95 < foretold / actual < 1.05, (foretold, actual)
