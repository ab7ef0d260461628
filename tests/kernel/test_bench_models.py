"""The benches' models: shapes from config.json of transformers 4 and 5, files for the peers."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.peers_cpu import build, gguf_file
from bench.serving.model_shape import ModelShape

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}

pytestmark = pytest.mark.cpu_only


def in_folder(folder: Path, **changes: Any) -> Path:
    """A folder with a config.json: SMALL with changes, without keys that are None."""
    config = {key: value for key, value in {**SMALL, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rope_theta": 1.0},
    ],
    ids=["transformers 4", "transformers 5", "theta beside", "both"],
)
def test_theta_of_either_transformers(rope, tmp_path):
    assert ModelShape.read(in_folder(tmp_path, **rope)).rope_theta == 500000.0


def test_what_may_be_absent(tmp_path):
    shape = ModelShape.read(in_folder(tmp_path, num_key_value_heads=None, head_dim=None))
    assert shape.rope_theta == 10000.0
    assert shape.num_kv_heads == 4 and shape.head_dim == 16
    assert shape.kv_numbers == 2 * 2 * 4 * 16


def test_what_may_not(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json has no hidden_size"):
        ModelShape.read(in_folder(tmp_path, hidden_size=None))
    by_layer = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ValueError, match="rope_parameters differ by layer"):
        ModelShape.read(in_folder(tmp_path, rope_parameters=by_layer))


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b"])
def test_the_models_of_the_benches(name):
    folder = ROOT / "bench/serving/models" / name
    config = json.loads((folder / "config.json").read_text())
    shape = ModelShape.read(folder)
    assert shape.rope_theta == config.pop("rope_theta")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1234.0}
    assert ModelShape.from_config(config) == replace(shape, rope_theta=1234.0)


def test_a_gguf_file_of_a_config_of_transformers_5(tmp_path):
    folder = in_folder(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 250000.0})
    matrices = gguf_file.write(tmp_path / "model.gguf", folder, "bf16")
    data = (tmp_path / "model.gguf").read_bytes()
    magic, version, tensors, _ = struct.unpack_from("<4sIQQ", data)
    assert (magic, version, tensors) == (b"GGUF", 3, 2 + 2 * 9)
    key = b"llama.rope.freq_base"
    at = data.index(key) + len(key)
    assert struct.unpack_from("<If", data, at) == (6, 250000.0)
    attention = 64 * 4 * 32 + 2 * 64 * 2 * 32 + 4 * 32 * 64
    assert matrices == 2 * (256 * 64 + 2 * (attention + 3 * 64 * 96))
    assert len(data) > matrices


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_the_shape_of_a_gguf_file(model_type, tmp_path):
    folder = in_folder(tmp_path, model_type=model_type, rope_theta=250000.0)
    file = tmp_path / "model.gguf"
    gguf_file.write(file, folder, "bf16")
    found = ModelShape.read(file)
    assert replace(found, rms_norm_eps=1e-5) == ModelShape.read(folder)
    assert found.rms_norm_eps == pytest.approx(1e-5)


def test_a_gguf_file_of_another_kind_of_model_is_refused(tmp_path):
    folder = in_folder(tmp_path, model_type="gpt2")
    with pytest.raises(ValueError, match="model_type is gpt2, expected llama or qwen3"):
        gguf_file.write(tmp_path / "model.gguf", folder, "bf16")


def test_no_build_tool_is_compiled_for_a_peer(monkeypatch):
    """pip is to take that one package as source, and its build tools as wheels."""
    commands = []
    monkeypatch.setattr(build.subprocess, "run", lambda command, check: commands.append(command))
    archive = build._downloaded()
    (command,) = commands
    assert command[command.index("--no-binary") + 1] == "llama-cpp-python"
    assert ":all:" not in command and archive.name == f"llama_cpp_python-{build.PACKAGE}.tar.gz"


def test_the_cmake_of_the_environment_is_found_first(monkeypatch, tmp_path):
    monkeypatch.setattr(build.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="pip install cmake"):
        build._cmake()
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert build._cmake() == "/usr/bin/cmake"
    (tmp_path / "cmake").touch()
    assert build._cmake() == str(tmp_path / "cmake")
