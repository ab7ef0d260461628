"""Model classes by architecture (config.json); other packages add theirs through "radix.models"."""

from __future__ import annotations

from typing import Protocol

import torch

from ..batch import ForwardBatch
from ..layers.base import BuildContext, Part
from ..model_config import ModelConfig
from ..registry import Registry
from .llama import LlamaForCausalLM


class CausalLM(Protocol):
    """What the engine uses of a model (an nn.Module)."""

    stacked: dict[str, tuple[str, Part]]

    def __init__(self, ctx: BuildContext, config: ModelConfig) -> None: ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None: ...


models: Registry[type[CausalLM]] = Registry("architecture", "radix.models")
for _name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
    models.register(_name)(LlamaForCausalLM)


def get_model_class(architecture: str) -> type[CausalLM]:
    return models.get(architecture)
