"""Configurations with the keys and values that published models have, sizes made small: what the
runtime makes of them, against what transformers does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from radix_runtime.errors import ConfigError
from radix_runtime.model_config import ModelConfig
from tests.runtime.family_models import random_model_of
from tests.runtime.model_steps import worst_error
from tests.runtime.tiny_models import Driver

torch.set_num_threads(1)
TOLERANCE = 1e-4
PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data/published_configs.json").read_text()
)
MINISTRAL = "mistralai/Ministral-3-8B-Instruct-2512"
MINIMAX = "MiniMaxAI/MiniMax-M2"
SMALL_3 = "mistralai/Mistral-Small-3.1-24B-Instruct-2503"


def reference(name: str, **changes: Any) -> Any:
    """transformers' model of a configuration, random."""
    keys = {**copy.deepcopy(PUBLISHED[name]), **changes}
    keys.pop("model_type")  # Kimi K2's is none of transformers
    (architecture,) = keys["architectures"]
    kind = getattr(transformers, architecture)
    return random_model_of(architecture, kind.config_class.from_dict(keys))


def write(folder: Path, model: Any, config: dict[str, Any]) -> Path:
    """The weights, with this config.json and not the one that transformers writes."""
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits(name: str, tmp_path: Path) -> None:
    # The class of Mistral 3 in transformers 5 takes the head to be the embedding, its files do not.
    model = reference(name, **({"tie_word_embeddings": False} if name == SMALL_3 else {}))
    driver = Driver(write(tmp_path, model, PUBLISHED[name]))
    assert driver.config.unknown_keys == ()
    error = worst_error(driver, model, seed=1)
    print(f"{name}: {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_that_the_file_of_a_multimodal_model_does_not_tell_of(
    is_tied: bool, tmp_path: Path
) -> None:
    model = reference(MINISTRAL, tie_word_embeddings=is_tied)
    config = copy.deepcopy(PUBLISHED[MINISTRAL])
    del config["tie_word_embeddings"]
    driver = Driver(write(tmp_path, model, config))
    assert driver.config.spec.tied_head == is_tied
    assert worst_error(driver, model, seed=2) < TOLERANCE


def test_a_tied_head_that_is_in_the_file_too(tmp_path: Path) -> None:
    model = reference(MINISTRAL, tie_word_embeddings=True)
    config = {**PUBLISHED[MINISTRAL], "tie_word_embeddings": True}
    file = write(tmp_path, model, config) / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["language_model.model.embed_tokens.weight"]
    save_file({**tensors, "language_model.lm_head.weight": embedding.clone()}, file)
    assert worst_error(Driver(tmp_path), model, seed=3) < TOLERANCE


def test_layers_that_draft_are_not_run(tmp_path: Path) -> None:
    """MiniMax-M2 says that there are three."""
    model = reference(MINIMAX)
    file = write(tmp_path, model, PUBLISHED[MINIMAX]) / "model.safetensors"
    tensors = load_file(file)
    drafts = {f"model.layers.{layer}.mlp.gate.weight": torch.ones(2, 2) for layer in (4, 5, 6)}
    save_file({**tensors, **drafts}, file)
    assert worst_error(Driver(tmp_path), model, seed=4) < TOLERANCE
    save_file({**tensors, "model.layers.7.mlp.gate.weight": torch.ones(2, 2)}, file)
    with pytest.raises(ConfigError, match=r"model\.layers\.7.* has no place in this model"):
        Driver(tmp_path)


@pytest.mark.parametrize(
    ("stored", "others", "expected"),
    [
        (torch.bfloat16, torch.float32, "bfloat16"),
        (torch.float16, torch.float16, "float16"),
        (torch.float32, torch.float32, "float32"),
    ],
)
def test_a_type_that_only_the_weights_tell(
    stored: torch.dtype, others: torch.dtype, expected: str, tmp_path: Path
) -> None:
    """As in MiniMax-M2's first file, whose routers are in float32."""
    model = reference(MINIMAX)
    assert not {"dtype", "torch_dtype"} & {*PUBLISHED[MINIMAX]}
    file = write(tmp_path, model, PUBLISHED[MINIMAX]) / "model.safetensors"
    tensors = load_file(file)
    kinds = {key: others if ".gate." in key else stored for key in tensors}
    save_file({key: tensors[key].to(kind) for key, kind in kinds.items()}, file)
    assert ModelConfig.from_dir(tmp_path).dtype == expected
    override = '{"torch_dtype": "float16"}'
    assert ModelConfig.from_dir(tmp_path, override).dtype == "float16"
    file.unlink()
    assert ModelConfig.from_dir(tmp_path).dtype == "float32"  # as transformers has it
