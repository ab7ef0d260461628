"""Config files of models with latent attention, as on the hub, and what is refused of them."""

from __future__ import annotations

from typing import Any

import pytest

from radix_runtime.errors import ConfigError
from radix_runtime.model_config import ModelConfig
from radix_runtime.specs import GroupedRouter, GroupedSoftmaxRouter, Mla, Mlp, Moe

# Shortened to the keys that the runtime reads or must know.
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 102400, "max_position_embeddings": 163840,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False, "scoring_func": "softmax",
    "routed_scaling_factor": 1.0, "aux_loss_alpha": 0.001, "seq_aux": True, "rope_theta": 10000,
    "attention_bias": False, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168,
    "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 64,
    "num_key_value_heads": 64, "vocab_size": 163840, "max_position_embeddings": 131072,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True, "ep_size": 1,
    "scoring_func": "sigmoid", "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
    "aux_loss_alpha": 0.001, "seq_aux": True, "rope_theta": 50000.0, "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip
GLM_4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
    "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47,
    "num_attention_heads": 20, "num_key_value_heads": 20, "vocab_size": 154880,
    "max_position_embeddings": 202752, "kv_lora_rank": 512, "q_lora_rank": 768,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64,
    "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 1.8, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0, "rope_theta": 1e6, "rope_scaling": None, "rms_norm_eps": 1e-5,
    "attention_bias": False, "dtype": "bfloat16",
}  # fmt: skip
CONFIGS = {"v2_lite": V2_LITE, "kimi_k2": KIMI_K2, "glm_4_7_flash": GLM_4_7_FLASH}


def read(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**CONFIGS[name], **changes})


def experts(model: ModelConfig) -> list[bool]:
    return [isinstance(layer.feed_forward, Moe) for layer in model.spec.layers]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_is_known(name: str) -> None:
    model = read(name)
    assert model.unknown_keys == () and model.spec.keeps_latents
    assert experts(model) == [False] + [True] * (model.num_layers - 1)
    assert model.max_context == CONFIGS[name]["max_position_embeddings"]


def test_v2_lite() -> None:
    model = read("v2_lite")
    mixer = model.spec.layers[0].mixer
    block = model.spec.layers[1].feed_forward
    assert isinstance(mixer, Mla) and isinstance(block, Moe) and block.shared is not None
    assert mixer.query_latent_dim is None and mixer.rope.interleaved
    assert mixer.scale == pytest.approx(192**-0.5 * 1.2608036**2)  # 0.0707 ln 40 + 1
    assert block.router == GroupedSoftmaxRouter(top_k=6)
    assert block.shared.mlp == Mlp(width=2816)
    for size in (1, 2, 4, 8, 16):
        model.check_tp(size)
    with pytest.raises(ConfigError, match="--tp-size 32 does not divide the 16 attention heads"):
        model.check_tp(32)


def test_kimi_k2() -> None:
    block = read("kimi_k2").spec.layers[1].feed_forward
    assert isinstance(block, Moe)
    assert block.router == GroupedRouter(top_k=8, num_groups=1, top_groups=1, scaling=2.827)


def test_glm_4_7_flash() -> None:
    mixer = read("glm_4_7_flash").spec.layers[0].mixer
    assert isinstance(mixer, Mla) and mixer.scale == 1 / 16 and mixer.rope.theta == 1e6
    kinds = ["sparse", "dense", "sparse"]
    model = read("glm_4_7_flash", num_hidden_layers=3, mlp_layer_types=kinds)
    assert experts(model) == [True, False, True]


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("v2_lite", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("v2_lite", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ("v2_lite", {"norm_topk_prob": True}, "norm_topk_prob true is not supported"),
        ("v2_lite", {"mlp_bias": True}, "mlp_bias true is not supported"),
        ("v2_lite", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("v2_lite", {"topk_method": "group_limited_greedy", "n_group": 5}, "n_group 5 and topk_"),
        ("kimi_k2", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ("kimi_k2", {"norm_topk_prob": False}, "norm_topk_prob false is not supported"),
        ("kimi_k2", {"n_group": 2, "topk_group": 3}, "n_group 2 and topk_group 3 do not fit"),
        ("kimi_k2", {"kv_lora_rank": 1024}, "kv_lora_rank 1024 is not a multiple of 16 up to 512"),
        ("kimi_k2", {"qk_rope_head_dim": 40}, "qk_rope_head_dim 40 is not a multiple of 16 up to"),
        ("kimi_k2", {"qk_nope_head_dim": 208}, "qk_nope_head_dim 208 is not a multiple of 16 up t"),
        ("kimi_k2", {"v_head_dim": 8}, "v_head_dim 8 is not a multiple of 16 up to 256"),
        ("glm_4_7_flash", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 47 of dense, s"),
        ("glm_4_7_flash", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(name, **changes)
