"""Formats whose weights are codes of 4 and 8 bits: how `quantized_tokens` writes a checkpoint in
each, and what the codes stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from radix_kernels import reference
from tests.runtime import quantized_models as q

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class CodeFormat:
    """`quantize`: a weight -> the tensors of the file and the float32 of what they stand for.
    `settings`: of `quantization_config`; `flags`: of the engine. `head`: what the vocabulary matrix
    stands for, where it is quantized too."""

    quantize: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    settings: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    head: Callable[[torch.Tensor], torch.Tensor] | None = None


def packed(weight: torch.Tensor, bits: int, group: int) -> tuple[Tensors, torch.Tensor]:
    """As compressed-tensors packs symmetric codes: half of their range is added, and the first is
    in the lowest bits of a word."""
    half = 2 ** (bits - 1)
    groups = weight.unflatten(1, (-1, group))
    scales = (groups.abs().amax(2) / (half - 0.5)).half().float()
    codes = (groups / scales[..., None]).round().clamp(-half, half - 1)
    widened = (codes * scales[..., None]).flatten(1)
    words = q.words_of((codes + half).flatten(1), bits)
    return {"weight_packed": words, "weight_scale": scales.half()}, widened


def packed_settings(bits: int, group: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def at_load(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """What the codes stand for that `--quantization` makes."""
    codes, scales = reference.quantize_weight(weight, bits, group)
    offset = 8 if bits == 4 else 0
    return reference.dequantize_weight(codes - offset, scales, None, group).float()


def _at_load(bits: int, group: int) -> CodeFormat:
    return CodeFormat(
        quantize=lambda weight: ({"weight": weight}, at_load(weight, bits, group)),
        flags={"quantization": f"int{bits}"},
        head=partial(at_load, bits=8, group=0),
    )


def _gptq(group: int, **changes: Any) -> CodeFormat:
    bits = changes.pop("bits", 4)
    desc_act = changes.get("desc_act", False)
    return CodeFormat(
        quantize=partial(q.gptq, bits=bits, group=group, desc_act=desc_act),
        settings=q.gptq_settings(bits, group, **changes),
    )


CODES = {
    "awq": CodeFormat(quantize=partial(q.awq, group=128), settings=q.awq_settings(128)),
    "gptq": _gptq(128),
    "gptq_desc_act": _gptq(128, desc_act=True),
    "gptq_8": _gptq(128, bits=8),
    "w4a16": CodeFormat(
        quantize=partial(packed, bits=4, group=32), settings=packed_settings(4, 32)
    ),
    "w8a16": CodeFormat(
        quantize=partial(packed, bits=8, group=128), settings=packed_settings(8, 128)
    ),
    "int4": _at_load(4, 64),
    "int8_weights": _at_load(8, 0),
}
# GGUF files of Llama, in these types in turn.
GGUF = {
    "q4_0": ("Q4_0",),
    "q8_0": ("Q8_0",),
    "q4_k": ("Q4_K", "Q6_K"),
    "gguf_mixed": ("Q4_1", "Q5_0", "Q5_1", "MXFP4"),
}


def write_gguf(folder: Path, kinds: tuple[str, ...]) -> tuple[Path, Path]:
    """A GGUF file, and a checkpoint of the float32 of what its codes stand for. ImportError without
    llama.cpp's package."""
    from tests.runtime import gguf_files

    case = gguf_files.CASES["llama"]
    sizes = {"vocab_size": 2048, "max_position_embeddings": 1024}
    case = replace(case, changes={**case.changes, **sizes})
    model = gguf_files.gguf_model(case)
    path = folder / "model.gguf"
    gguf_files.write_gguf(path, case, model, gguf_files.as_codes(*kinds))
    model.save_pretrained(folder / "floats")
    return path, folder / "floats"
