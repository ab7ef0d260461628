"""Families: from a checkpoint's config.json to a ModelSpec, and from its tensors' names to ours.
One file a family; other packages add theirs: "radix.families". Loads no torch."""

from typing import Any

from ..registry import Registry
from . import llama, mistral, qwen
from .family import Family

# By the architecture that config.json names.
families: Registry[Family[Any]] = Registry(
    kind="architecture",
    group="radix.families",
    items={
        "LlamaForCausalLM": llama.LLAMA,
        "MistralForCausalLM": mistral.MISTRAL,
        "Qwen2ForCausalLM": qwen.QWEN2,
        "Qwen3ForCausalLM": qwen.QWEN3,
    },
)
# Of a package that registers a model class and no family: "radix.models".
generic_family = llama.GENERIC

__all__ = ["Family", "families", "generic_family"]
