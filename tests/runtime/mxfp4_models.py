"""Small gpt-oss checkpoints with experts of random MXFP4 codes, under the names that the real ones
have, and transformers' float32 models of what the codes stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.runtime.family_models import FAMILY_MODELS, FamilyModel, random_model
from tests.runtime.quantized_models import Checkpoint, Tensors
from tests.runtime.tiny_models import save

# As the real files have it.
SETTINGS: dict[str, Any] = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
_EXPERTS = r"^(model\.layers\.\d+)\.mlp\.experts\.(gate_up_proj|down_proj)$"


def write(
    folder: Path,
    width: int,
    settings: Mapping[str, Any] = SETTINGS,
    *,
    left_out: tuple[str, ...] = (),
    sizes: Mapping[str, Any] | None = None,
    exponents: range = range(120, 125),
    spread: float = 0.15,
) -> Checkpoint:
    """The checkpoint of a model with experts of this width; those of the layers `left_out`
    (`model.layers.1`) stay floats. `sizes`: other keys of its configuration. `exponents`: those of
    the blocks, plus 127. `spread`: of experts that stay floats."""
    changes = {**FAMILY_MODELS["gpt_oss"].changes, "intermediate_size": width, **(sizes or {})}
    model = random_model(FamilyModel("GptOss", changes))
    for key, param in model.named_parameters():
        if re.match(_EXPERTS, key):
            param.data.mul_(spread / 0.15)
    save(model, folder)
    tensors: Tensors = {}
    generator = torch.Generator().manual_seed(width)
    params = dict(model.named_parameters())
    for key, tensor in load_file(folder / "model.safetensors").items():
        found = re.match(_EXPERTS, key)
        if found is None or found[1] in left_out:
            tensors[key] = tensor
            continue
        blocks, scales = _random_codes(tensor.shape, exponents, generator)
        tensors[f"{key}_blocks"] = blocks
        tensors[f"{key}_scales"] = scales
        params[key].data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(settings)
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(folder=folder, reference=model)


def _random_codes(
    shape: torch.Size, exponents: range, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of experts [E, inputs, outputs], in which every code is as likely."""
    experts, inputs, outputs = shape
    size = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(
        exponents.start, exponents.stop, size, dtype=torch.uint8, generator=generator
    )
    return blocks, scales
