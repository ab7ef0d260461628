"""Model directories: hub names, generation_config.json and end-of-sequence ids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from radix_runtime.errors import ConfigError
from radix_runtime.hub import DEMO_MODEL_DIR, resolve_model_path, served_name
from radix_runtime.text.generation_config import (
    GenerationConfig,
    eos_token_ids,
    load_generation_config,
)
from radix_runtime.text.tokenizer import load_tokenizer
from tests.runtime.command import radix
from tests.runtime.fake_hub import OTHER_COMMIT, FakeHub
from tests.runtime.server_process import environment

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


def test_values_out_of_range_are_the_operators_business(tmp_path: Path) -> None:
    """Every request without a value of its own would be refused for it."""
    file = tmp_path / "generation_config.json"
    for text, what in (
        ('{"temperature": -5}', "temperature must be in"),
        ('{"top_p": 0.0}', "top_p must be in"),
        ('{"repetition_penalty": 30}', "repetition_penalty must be in"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"generation_config.json: {what}.*openai"):
            load_generation_config(tmp_path).sampling_defaults()


def test_resolve(tmp_path: Path) -> None:
    assert resolve_model_path(None) == DEMO_MODEL_DIR
    assert resolve_model_path(str(tmp_path)) == tmp_path
    for wrong in ("no such place", "gpt2", "a/b/c"):
        with pytest.raises(ConfigError, match="neither"):
            resolve_model_path(wrong)
    for wrong in ("/no/such/place", "./nope", "../nope", "~/no/such/place"):
        with pytest.raises(ConfigError, match=f"there is no directory {wrong}"):
            resolve_model_path(wrong)
    with pytest.raises(ConfigError, match="--revision is for models of the hub"):
        resolve_model_path(str(tmp_path), revision="main")


def test_a_file_is_no_model(tmp_path: Path) -> None:
    plain = tmp_path / "passwd"
    plain.write_text("root:x")
    with pytest.raises(ConfigError, match="passwd is a file; a model is a directory with"):
        resolve_model_path(str(plain))
    with pytest.raises(ConfigError, match=r"there is no file .*absent\.gguf"):
        resolve_model_path(str(tmp_path / "absent.gguf"))


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    for name in ("x.gguf", "weights"):
        gguf = tmp_path / name
        gguf.write_bytes(b"GGUF\x03\0\0\0")
        assert resolve_model_path(str(gguf)) == gguf
    with pytest.raises(ConfigError, match="--revision is for models of the hub"):
        resolve_model_path(str(gguf), revision="main")


# The hub, imitated ----------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serves the demo model and others to processes that are started meanwhile."""
    demo = {file.name: file.read_bytes() for file in DEMO_MODEL_DIR.iterdir()}
    copies = {
        "consolidated.safetensors": b"the same weights again",
        "original/model.safetensors": b"and again",
        "original/params.json": b"{}",
        "pytorch_model.bin": b"and again",
        "modeling.py": b"raise SystemExit('code was run')",
    }
    config = json.loads(demo["config.json"])
    bloom = {**demo, "config.json": _json({**config, "architectures": ["BloomForCausalLM"]})}
    awq = {**demo, "config.json": _json({**config, "quantization_config": {"quant_method": "hqq"}})}
    hub = FakeHub(
        {
            "org/demo": {**demo, **copies},
            "org/bloom": bloom,
            "org/awq": awq,
            "org/gated": "gated",
            "org/private": "private",
        }
    )
    with hub.serving():
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def test_a_hub_model_is_fetched_once_and_without_a_log_of_requests(
    hub: FakeHub, tmp_path: Path
) -> None:
    """`radix serve` to the end of its downloads: the tokenizer that it lacks then stops it."""
    files = hub.repositories["org/demo"]
    assert isinstance(files, dict)
    files["tokenizer.json"] = b"{}"
    cache = tmp_path / "models"
    flags = ("--revision", "v2", "--download-dir", str(cache), "--port", "0")
    result = radix("serve", "org/demo", *flags)
    assert result.returncode == 78 and "tokenizer" in result.stderr.splitlines()[-1]
    assert sorted(hub.gets) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    # The weights are of the commit that the configuration was of, though a branch may move.
    assert hub.revisions == ["v2", OTHER_COMMIT]
    assert list(cache.glob(f"models--org--demo/snapshots/{OTHER_COMMIT}/model.safetensors"))
    assert "HTTP Request" not in result.stderr and "127.0.0.1" not in result.stderr


def test_a_model_that_cannot_be_served_costs_no_download(hub: FakeHub) -> None:
    for name, reason in (
        ("org/bloom", "architecture ['BloomForCausalLM'] is not supported"),
        ("org/awq", "quant_method 'hqq' is unknown"),
    ):
        hub.gets.clear()
        result = radix("serve", name, "--port", "0")
        assert result.returncode == 78 and reason in result.stderr
        assert "config.json" in hub.gets and "model.safetensors" not in hub.gets


def test_the_hubs_reasons_come_through_in_one_line(hub: FakeHub) -> None:
    code = (
        "import sys\nfrom radix_runtime.hub import resolve_model_path\n"
        "for name, revision in (a.split('@') for a in sys.argv[1:]):\n"
        "    try: resolve_model_path(name, revision=revision or None)\n"
        "    except Exception as error: print(type(error).__name__, str(error))"
    )
    names = ["org/gated@", "org/private@", "org/none@", "org/demo@v9"]
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment("/tmp"), check=True, timeout=60
    )
    gated, private, absent, revision = done.stdout.splitlines()
    assert "Access to model org/gated is restricted" in gated and "HF_TOKEN" in gated
    for line in (private, absent):
        assert "Repository Not Found" in line and "HF_TOKEN" in line
        assert "there is no such directory" in line
    assert "Revision Not Found" in revision and "HF_TOKEN" not in revision
    assert all(line.startswith("ConfigError cannot fetch model 'org/") for line in
               (gated, private, absent, revision))  # fmt: skip
    assert "Request ID" not in done.stdout


REFUSED_LATER = ("--port", "0", "--attention-backend", "triton")  # on a CPU, by the scheduler


def test_no_weights_are_fetched_for_random_ones(hub: FakeHub) -> None:
    result = radix("serve", "org/demo", "--load-format", "dummy", *REFUSED_LATER)
    assert result.returncode == 78 and "attention backend triton" in result.stderr
    assert "config.json" in hub.gets and "model.safetensors" not in hub.gets


def test_the_weights_of_an_index_are_fetched_alone(hub: FakeHub) -> None:
    files = hub.repositories["org/demo"]
    assert isinstance(files, dict)
    part = "model-00001-of-00001.safetensors"
    with safe_open(DEMO_MODEL_DIR / "model.safetensors", framework="numpy") as file:
        index = {"weight_map": dict.fromkeys(file.keys(), part)}
    files[part] = files["model.safetensors"]
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    result = radix("serve", "org/demo", *REFUSED_LATER)
    assert result.returncode == 78 and "attention backend triton" in result.stderr
    assert part in hub.gets and "model.safetensors" not in hub.gets


def test_the_name_of_a_model_for_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the hub; a directory by its last part, from wherever it is named."""
    commit = "models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca"
    for folder in ("models/llama-8b", commit, f"{commit}/inner", "models--a--b/other/c"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path / "models/llama-8b")
    assert served_name(None) == "radix-demo"
    assert served_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert served_name(str(tmp_path / commit)) == "Qwen/Qwen3-0.6B"
    assert served_name(f"{tmp_path / commit}/inner") == "inner"
    assert served_name(str(tmp_path / "models--a--b/other/c")) == "c"
    for name in (".", "../llama-8b/", str(tmp_path / "models/llama-8b")):
        assert served_name(name) == "llama-8b"
    assert served_name("/") == "/"
    (tmp_path / "tiny.Q4_1.gguf").touch()
    assert served_name(str(tmp_path / "tiny.Q4_1.gguf")) == "tiny.Q4_1"
    assert served_name("/nowhere/tiny.gguf") == "/nowhere/tiny.gguf"
