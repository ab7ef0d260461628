"""Model directories: hub names, generation_config.json and end-of-sequence ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radix_runtime.errors import ConfigError
from radix_runtime.hub import DEMO_MODEL_DIR, resolve_model_path
from radix_runtime.text.generation_config import (
    GenerationConfig,
    eos_token_ids,
    load_generation_config,
)
from radix_runtime.text.tokenizer import load_tokenizer

DEMO = load_tokenizer(DEMO_MODEL_DIR)


def test_generation_config(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path) == GenerationConfig()
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 1, "top_k": 0, "eos_token_id": [7, 8], "other": {}}')
    config = load_generation_config(tmp_path)
    assert config == GenerationConfig(temperature=1.0, top_k=-1, eos_token_id=[7, 8])
    assert config.sampling_defaults() == {"temperature": 1.0, "top_k": -1}
    assert eos_token_ids(tmp_path, DEMO) == (7, 8, 2)
    file.unlink()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert eos_token_ids(tmp_path, None) == (5,)
    assert eos_token_ids(tmp_path, DEMO) == (5, 2)  # not the tokenizer's alone
    file.write_text('{"temperature": 1}')
    assert eos_token_ids(tmp_path, DEMO) == (5, 2)
    file.write_text('{"eos_token_id": 7}')
    assert eos_token_ids(tmp_path, DEMO) == (7, 2)
    for wrong in ('{"temperature": "hot"}', '{"top_k": true}', '{"eos_token_id": "x"}', "[]", "{"):
        file.write_text(wrong)
        with pytest.raises(ConfigError):
            load_generation_config(tmp_path)


def test_resolve(tmp_path: Path) -> None:
    assert resolve_model_path(None) == DEMO_MODEL_DIR
    assert resolve_model_path(str(tmp_path)) == tmp_path
    for wrong in ("no such place", "/no/such/place", "a/b/c"):
        with pytest.raises(ConfigError, match="neither"):
            resolve_model_path(wrong)


def test_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/none":
            raise OSError("404 not found\nlong explanation")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model_path("org/model") == tmp_path
    assert resolve_model_path("org/model", weights=False) == tmp_path
    assert [("*.safetensors" in patterns) for _, patterns in asked] == [True, False]
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for _, p in asked for pattern in p)
    with pytest.raises(ConfigError) as caught:
        resolve_model_path("org/none")
    assert "\n" not in str(caught.value) and "404" in str(caught.value)
