"""Families: from a checkpoint's config.json to a ModelSpec, and from its tensors' names to ours.
One file a family; other packages add theirs: "radix.families". Loads no torch."""

from typing import Any

from ..registry import Registry
from . import (
    deepseek,
    dots1,
    ernie,
    exaone,
    gemma,
    gemma1,
    glm,
    gpt_oss,
    granite,
    llama,
    minimax,
    mistral,
    mixtral,
    olmo,
    phi,
    qwen,
    seed_oss,
    smollm,
)
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
        "DeepseekV2ForCausalLM": deepseek.DEEPSEEK_V2,
        "DeepseekV3ForCausalLM": deepseek.DEEPSEEK_V3,
        "Dots1ForCausalLM": dots1.DOTS1,
        "Ernie4_5ForCausalLM": ernie.ERNIE,
        "Exaone4ForCausalLM": exaone.EXAONE4,
        "GemmaForCausalLM": gemma1.GEMMA1,
        "Gemma2ForCausalLM": gemma.GEMMA2,
        "Gemma3ForCausalLM": gemma.GEMMA3,
        "Gemma3ForConditionalGeneration": gemma.GEMMA3_VL,
        "GlmForCausalLM": glm.GLM,
        "Glm4ForCausalLM": glm.GLM4,
        "Glm4MoeForCausalLM": glm.GLM4_MOE,
        "Glm4MoeLiteForCausalLM": deepseek.GLM4_MOE_LITE,
        "GptOssForCausalLM": gpt_oss.GPT_OSS,
        "GraniteForCausalLM": granite.GRANITE,
        "GraniteMoeForCausalLM": granite.GRANITE_MOE,
        "MinistralForCausalLM": mistral.MINISTRAL,
        "Ministral3ForCausalLM": mistral.MINISTRAL3,
        "Mistral3ForConditionalGeneration": mistral.MISTRAL3,
        "MiniMaxM2ForCausalLM": minimax.MINIMAX_M2,
        "MixtralForCausalLM": mixtral.MIXTRAL,
        "Olmo2ForCausalLM": olmo.OLMO2,
        "Olmo3ForCausalLM": olmo.OLMO3,
        "OlmoeForCausalLM": olmo.OLMOE,
        "Phi3ForCausalLM": phi.PHI3,
        "Qwen2MoeForCausalLM": qwen.QWEN2_MOE,
        "Qwen2VLForConditionalGeneration": qwen.QWEN2_VL,
        "Qwen2_5_VLForConditionalGeneration": qwen.QWEN2_VL,
        "Qwen3MoeForCausalLM": qwen.QWEN3_MOE,
        "Qwen3VLForConditionalGeneration": qwen.QWEN3_VL,
        "Qwen3VLMoeForConditionalGeneration": qwen.QWEN3_VL_MOE,
        "SeedOssForCausalLM": seed_oss.SEED_OSS,
        "SmolLM3ForCausalLM": smollm.SMOLLM3,
    },
)
# What the first files of a model said, before transformers had it -> its name there.
former_names = {"Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM"}
# Of a package that registers a model class and no family: "radix.models".
generic_family = llama.GENERIC

__all__ = ["Family", "families", "former_names", "generic_family"]
