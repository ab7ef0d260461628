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
    assert config("Qwen2", foo=1, bar=None).unknown_keys == ("bar", "foo")
    assert config("Mistral", max_window_layers=28).unknown_keys == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [("final_logit_softcapping", 30.0), ("embedding_multiplier", 12), ("num_experts", 8),
     ("kv_lora_rank", 512), ("no_rope_layers", [1, 0])],
)  # fmt: skip
def test_a_key_that_would_change_the_result_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} .* is not supported for this architecture"):
        config(**{key: value})
    for at_rest in (None, 0, 1.0, False):
        config(**{key: at_rest})


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
    with pytest.raises(ConfigError, match=r"quantized checkpoints \(fp8\)"):
        ModelConfig.from_dict({**outer, "quantization_config": {"quant_method": "fp8"}})


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
    with pytest.raises(ConfigError, match="the 33 of an expert and exceeds the 3 experts"):
        model.check_tp(4)
    with pytest.raises(ConfigError, match="num_experts is missing"):
        config("Qwen3Moe", num_experts_per_tok=2, moe_intermediate_size=32)
