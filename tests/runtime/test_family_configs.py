"""What families make of config.json: keys that they do not know, patterns of layers, the text of
multimodal models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radix_runtime.errors import ConfigError
from radix_runtime.model_config import ModelConfig
from radix_runtime.specs import Rope
from tests.runtime.test_model_config import BASE, config, rope, windows


def test_keys_that_are_not_known() -> None:
    assert config(foo=1, _private=2, use_cache=True, eos_token_id=[1, 2]).unknown_keys == ("foo",)
    assert config("Qwen2", foo=1, bar=0, null=None).unknown_keys == ("bar", "foo")
    assert config("Mistral", max_window_layers=28, top_k=50, pruned_heads={}).unknown_keys == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [("final_logit_softcapping", 30.0), ("embedding_multiplier", 12), ("num_experts", 8),
     ("kv_lora_rank", 512), ("no_rope_layers", [1, 0]), ("use_bidirectional_attention", True),
     ("use_qk_norm", True), ("rope_interleaved", True)],
)  # fmt: skip
def test_a_key_that_would_change_the_result_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} .* is not supported for this architecture"):
        config(**{key: value})
    for at_rest in (None, 0, 1.0, False, []):
        assert config(**{key: at_rest}).unknown_keys == ()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                      "use_qk_norm": False}),
        ("MiniMaxM2", {"num_local_experts": 4, "use_routing_bias": False}),
        ("MiniMaxM2", {"num_local_experts": 4, "use_qk_norm": False}),
    ],
)  # fmt: skip
def test_a_part_that_is_switched_off_is_refused(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="false is not supported"):
        config(family, **changes)


def test_text_of_a_multimodal_model(tmp_path: Path) -> None:
    text = {**BASE, "torch_dtype": "float16", "rope_theta": 3e4}
    del text["architectures"]
    outer = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 7, "depth": 1},
        "image_token_id": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    ours = ModelConfig.from_dir(tmp_path)
    assert ours.spec.hidden_size == 64 and ours.dtype == "float16"
    assert rope(ours).theta == 3e4 and not ours.spec.tied_head and ours.unknown_keys == ()
    changed = ModelConfig.from_dir(tmp_path, '{"rope_theta": 7, "num_hidden_layers": 2}')
    assert rope(changed).theta == 7.0 and changed.num_layers == 2
    assert ModelConfig.from_dict({**outer, "tie_word_embeddings": True}).spec.tied_head
    quantization = {"quant_method": "fp8"}
    config = ModelConfig.from_dict({**outer, "quantization_config": quantization})
    assert config.quantization == quantization


# As on the hub, where transformers 4 wrote them; shortened to the keys that the runtime reads.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 12,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}  # fmt: skip


def test_gemma3_of_the_hub() -> None:
    """Its file leaves out what is the default of its class."""
    model = ModelConfig.from_dict(GEMMA3_4B)
    local, full = model.spec.layers[0].mixer, model.spec.layers[5].mixer
    assert (local.num_heads, local.num_kv_heads, local.head_dim) == (8, 4, 256)
    assert local.window == 1024 and local.rope == Rope(theta=1e4, rotary_dim=256)
    scaling = {"rope_type": "linear", "factor": 8.0}
    assert full.window is None and full.rope == Rope(theta=1e6, rotary_dim=256, scaling=scaling)
    assert model.vocab_size == 262208 and model.max_context == 131072 and model.spec.tied_head


def test_patterns_of_layers() -> None:
    sizes = {"num_key_value_heads": 2, "sliding_window": 8, "num_hidden_layers": 8}
    exaone = config("Exaone4", **sizes, sliding_window_pattern="LLLG")
    assert windows(exaone) == (8, 8, 8, None) * 2
    positions = [layer.mixer.rope is not None for layer in exaone.spec.layers]
    assert positions == [True, True, True, False] * 2
    assert windows(config("Gemma2", **sizes)) == (8, None) * 4
    assert windows(config("Olmo3", **sizes)) == (8, 8, 8, None) * 2


def test_experts_and_ranks() -> None:
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 33}
    model = config("Qwen3Moe", **sizes, intermediate_size=96)
    model.check_tp(2)
    with pytest.raises(ConfigError, match="the width 33 of an expert and exceeds the 3 experts"):
        model.check_tp(4)
    with pytest.raises(ConfigError, match="num_experts is missing"):
        config("Qwen3Moe", num_experts_per_tok=2, moe_intermediate_size=32)


def test_qwen2_5_vl_of_the_hub() -> None:
    """One flat file; the three positions of a token of text are one."""
    model = config(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        rope_theta=1e6,
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        vision_config={"depth": 32},
        image_token_id=7,
    )
    assert rope(model) == Rope(theta=1e6, rotary_dim=16) and model.unknown_keys == ()


# What files of the hub have beyond the sizes.
_HUB: dict[str, dict[str, Any]] = {
    "Phi3": {
        "attention_bias": False, "full_attn_mod": 1, "interpolate_factor": 1, "mlp_bias": False,
        "lm_head_bias": False, "partial_rotary_factor": 0.75, "sliding_window": 262144,
        "original_max_position_embeddings": 128, "resid_pdrop": 0.0, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
    },
    "GptOss": {
        "num_local_experts": 4, "head_dim": 64, "experts_per_token": 4, "swiglu_limit": 7.0,
        "initial_context_length": 4096, "num_experts_per_tok": 4, "rope_theta": 150000,
        "router_aux_loss_coef": 0.9, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": False},
    },
    "MiniMaxM2": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16,
        "attn_type_list": [1] * 4, "mtp_transformer_layers": 1, "num_mtp_modules": 3,
        "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "shared_intermediate_size": 0,
        "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True,
    },
    "Glm4Moe": {
        "n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "norm_topk_prob": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", _HUB)
def test_keys_of_hub_files(family: str) -> None:
    model = config(family, **_HUB[family])
    assert model.unknown_keys == ()
    rotary = {"Phi3": 12, "GptOss": 64, "MiniMaxM2": 16, "Glm4Moe": 8}
    assert rope(model).rotary_dim == rotary[family]


def test_longrope_grows_by_the_ratio_of_contexts() -> None:
    scaling = rope(config("Phi3", **_HUB["Phi3"])).scaling
    assert scaling is not None and scaling["factor"] == 4.0
    assert scaling["original_max_position_embeddings"] == 128
