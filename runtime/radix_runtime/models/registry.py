"""Model classes by architecture (config.json); other packages add theirs through "radix.models"."""

from __future__ import annotations

from ..registry import Registry
from .base import CausalLM
from .llama import LlamaForCausalLM

models: Registry[type[CausalLM]] = Registry(
    "architecture",
    "radix.models",
    {f"{family}ForCausalLM": LlamaForCausalLM for family in ("Llama", "Mistral", "Qwen2", "Qwen3")},
)
