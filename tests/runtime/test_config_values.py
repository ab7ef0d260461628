"""Model files with values that no model has: one line about them, before anything is built."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from radix_runtime.config_values import check_values
from radix_runtime.errors import ConfigError
from radix_runtime.hub import DEMO_MODEL_DIR, read_json
from radix_runtime.model_config import ModelConfig

DEMO: dict[str, Any] = json.loads((DEMO_MODEL_DIR / "config.json").read_text())


def refused(folder: Path, text: str) -> str:
    (folder / "config.json").write_text(text)
    start = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dir(folder)
    assert time.monotonic() - start < 5
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"vocab_size": 1e300}, "vocab_size"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("-inf")}}, "rope_scaling.factor"),
        ({"layer_types": ["full_attention"], "num_hidden_layers": 8}, "layer_types"),
        ({"unknown": [[1.0, float("nan")]]}, "unknown[0][1]"),
    ],
)
def test_absurd_values(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    assert named in refused(tmp_path, json.dumps({**DEMO, **change}))


def test_absurd_values_of_a_text_config(tmp_path: Path) -> None:
    text = {**DEMO, "text_config": {**DEMO, "rope_theta": float("inf")}}
    assert "rope_theta" in refused(tmp_path, json.dumps(text))


def test_a_file_that_is_nested_too_deep(tmp_path: Path) -> None:
    assert "too deep" in refused(tmp_path, '{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


def test_a_pipe_in_place_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "special_tokens_map.json")
    with pytest.raises(ConfigError, match="not a file"):
        read_json(tmp_path / "special_tokens_map.json")
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError):
        ModelConfig.from_dir(tmp_path)
    assert read_json(tmp_path / "none.json") == {}


def test_what_models_have_passes() -> None:
    check_values(DEMO)
    check_values({**DEMO, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 3})
