"""Model classes by architecture (config.json); other packages add theirs through "radix.models"."""

from __future__ import annotations

from ..registry import Registry
from .base import CausalLM
from .llama import LlamaForCausalLM

models: Registry[type[CausalLM]] = Registry("architecture", "radix.models")
for _name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
    models.register(_name)(LlamaForCausalLM)


def get_model_class(architecture: str) -> type[CausalLM]:
    return models.get(architecture)
