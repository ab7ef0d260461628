"""Random checkpoints whose layers ranks cut in every way: heads, widths, experts, latent values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.gpu.llama_tokens import LLAMA

LAYERS = 3
HIDDEN = 512
HEADS = 8
INNER = 512
EXPERTS = 8
EXPERT_WIDTH = 256
VOCABULARY = 2046  # no multiple of four, nor of the ranks

_SIZES: dict[str, Any] = {
    **LLAMA,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "moe_intermediate_size": EXPERT_WIDTH,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_QWEN3_MOE: dict[str, Any] = {
    **_SIZES,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 4,
    "num_experts": EXPERTS,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_DEEPSEEK: dict[str, Any] = {
    **_SIZES,
    "architectures": ["DeepseekV2ForCausalLM"],
    "intermediate_size": INNER,
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}


def _gated(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj": (width, HIDDEN),
        f"{name}.up_proj": (width, HIDDEN),
        f"{name}.down_proj": (HIDDEN, width),
    }


def _experts() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate": (EXPERTS, HIDDEN)}
    for number in range(EXPERTS):
        shapes |= _gated(f"mlp.experts.{number}", EXPERT_WIDTH)
    return shapes


def _qwen3_moe_layer(_: int) -> dict[str, tuple[int, ...]]:
    head = _QWEN3_MOE["head_dim"]
    kv = _QWEN3_MOE["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (HEADS * head, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * head),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        **_experts(),
    }


def _deepseek_layer(number: int) -> dict[str, tuple[int, ...]]:
    c = _DEEPSEEK
    latent = c["kv_lora_rank"]
    nope = c["qk_nope_head_dim"]
    rope = c["qk_rope_head_dim"]
    value = c["v_head_dim"]
    attention: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HEADS * (nope + rope), HIDDEN),
        "self_attn.kv_a_proj_with_mqa": (latent + rope, HIDDEN),
        "self_attn.kv_a_layernorm": (latent,),
        "self_attn.kv_b_proj": (HEADS * (nope + value), latent),
        "self_attn.o_proj": (HIDDEN, HEADS * value),
    }
    if number == 0:
        return {**attention, **_gated("mlp", INNER)}
    return {**attention, **_experts(), **_gated("mlp.shared_experts", EXPERT_WIDTH)}


_MODELS: dict[str, tuple[dict[str, Any], Any]] = {
    "qwen3-moe": (_QWEN3_MOE, _qwen3_moe_layer),
    "deepseek-v2": (_DEEPSEEK, _deepseek_layer),
}
NAMES = tuple(_MODELS)


def random_model(name: str, folder: Path) -> Path:
    """A checkpoint in `folder` whose weights are large enough for clear decisions."""
    config, layer = _MODELS[name]
    g = torch.Generator().manual_seed(13)

    def draw(*shape: int) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.randn(*shape, generator=g) * 1.5 / shape[-1] ** 0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=g),
        "lm_head.weight": draw(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for number in range(LAYERS):
        shapes = layer(number)
        shapes["input_layernorm"] = (HIDDEN,)
        shapes["post_attention_layernorm"] = (HIDDEN,)
        for module, shape in shapes.items():
            tensors[f"model.layers.{number}.{module}.weight"] = draw(*shape)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
