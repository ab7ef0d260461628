"""What the metadata of single architectures says in GGUF files, and what ends an answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radix_runtime.errors import ConfigError
from radix_runtime.gguf import open_gguf
from radix_runtime.gguf.architectures import read_model
from radix_runtime.model_config import ModelConfig
from radix_runtime.specs import GroupedRouter, Moe
from tests.runtime.gguf_files import CASES, as_floats, gguf_model, write_gguf
from tests.runtime.test_gguf_header import write

CONTROL = 3  # llama.cpp's type of special tokens
NORMAL = 1


def with_keys(path: Path, name: str, keys: dict[str, Any]) -> Path:
    """The file of a case with other metadata; None leaves a key out."""
    case = CASES[name]
    given = {key: value for key, value in {**case.keys, **keys}.items() if value is not None}
    return write_gguf(path, replace(case, keys=given), gguf_model(case), as_floats())


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("glm4moe", {"expert_gating_func": 1},
         r"'glm4moe.expert_gating_func' is 1, supported is 2 \(sigmoid\)"),
        ("glm4moe", {"expert_weights_norm": 1},
         "'glm4moe.expert_weights_norm' is 1, expected a boolean"),
        ("glm4moe", {"leading_dense_block_count": "1"},
         "'glm4moe.leading_dense_block_count' is '1', expected an integer of 0 or more"),
        ("glm4moe", {"expert_count": None}, "'glm4moe.expert_count' is missing"),
        ("glm4moe", {"nextn_predict_layers": 3}, "num_hidden_layers"),
        ("exaone4", {"attention.sliding_window_pattern": [True]},
         "sliding_window_pattern' is .*, expected an array of 2 booleans"),
        ("exaone4", {"attention.sliding_window_pattern": 4},
         "sliding_window_pattern' is 4, expected an array of 2 booleans"),
        ("minimax_m2", {"expert_gating_func": 3}, "supported is 2"),
        ("gpt_oss", {"attention.sliding_window": None}, "attention.sliding_window' is missing"),
        ("mistral3", {"rope.scaling.type": "none"}, "llama_4_scaling_beta needs"),
    ],
)  # fmt: skip
def test_wrong_metadata(name: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = with_keys(tmp_path / "model.gguf", name, keys)
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_dir(path)
    assert "\n" not in str(caught.value)


def test_what_a_file_leaves_out_is_as_llama_cpp_has_it(tmp_path: Path) -> None:
    absent = dict.fromkeys(["expert_gating_func", "expert_weights_norm", "expert_weights_scale",
                            "expert_group_count", "expert_group_used_count"])  # fmt: skip
    path = with_keys(tmp_path / "model.gguf", "glm4moe", absent)
    model = ModelConfig.from_dir(path)
    moe = model.spec.layers[1].feed_forward
    assert isinstance(moe, Moe) and model.num_layers == 2
    assert moe.router == GroupedRouter(top_k=3, num_groups=1, top_groups=1, scaling=1.0)


def end_texts(path: Path, texts: list[str], kind: int = CONTROL) -> set[str]:
    """The texts of the tokens that end an answer, where these are special ones of a file."""
    tokens = ["<unk>", "<s>", "</s>", "a", *texts]

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["tokenizer.ggml.tokens"] = tokens
        metadata["tokenizer.ggml.token_type"] = [2, CONTROL, CONTROL, NORMAL] + [kind] * len(texts)
        metadata["tokenizer.ggml.merges"] = []
        tensors["token_embd.weight"] = (len(tokens), 32)

    ids = read_model(open_gguf(write(path, change))).config["eos_token_id"]
    return {tokens[index] for index in ids}


def test_a_message_of_gpt_oss_does_not_end_its_answer(tmp_path: Path) -> None:
    harmony = ["<|return|>", "<|call|>", "<|end|>", "<|start|>"]
    assert end_texts(tmp_path / "gpt-oss", harmony) == {"<|return|>", "<|call|>"}
    assert end_texts(tmp_path / "phi-3", ["<|end|>", "<|user|>"]) == {"<|end|>"}
    assert end_texts(tmp_path / "texts", harmony, kind=NORMAL) == set()
