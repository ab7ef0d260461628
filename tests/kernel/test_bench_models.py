"""The benches' models: shapes from config.json of transformers 4 and 5, files for the peers."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from bench.peers_cpu import build, ggml_blocks, gguf_file, llama_model
from bench.serving import checkpoint_file, cpu
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
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
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
    matrices, experts = gguf_file.write(tmp_path / "model.gguf", folder, "bf16")
    data = (tmp_path / "model.gguf").read_bytes()
    magic, version, tensors, _ = struct.unpack_from("<4sIQQ", data)
    assert (magic, version, tensors) == (b"GGUF", 3, 2 + 2 * 9)
    key = b"llama.rope.freq_base"
    at = data.index(key) + len(key)
    assert struct.unpack_from("<If", data, at) == (6, 250000.0)
    attention = 64 * 4 * 32 + 2 * 64 * 2 * 32 + 4 * 32 * 64
    assert matrices == 2 * (256 * 64 + 2 * (attention + 3 * 64 * 96))
    assert len(data) > matrices and experts == 0


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_the_shape_of_a_gguf_file(model_type, tmp_path):
    folder = in_folder(tmp_path, model_type=model_type, rope_theta=250000.0)
    file = tmp_path / "model.gguf"
    gguf_file.write(file, folder, "bf16")
    found = ModelShape.read(file)
    assert replace(found, rms_norm_eps=1e-5) == ModelShape.read(folder)
    assert found.rms_norm_eps == pytest.approx(1e-5)


def test_the_shape_of_a_gguf_file_with_experts(tmp_path):
    folder = in_folder(tmp_path, **EXPERTS)
    file = tmp_path / "model.gguf"
    read = gguf_file.write(file, folder, "int8")
    found = ModelShape.read(file)
    assert found == replace(ModelShape.read(folder), rms_norm_eps=found.rms_norm_eps)
    assert read.experts == 2 * 6 * 3 * 64 * 32 * 34 // 32
    attention = (64 * 4 * 32 + 2 * 64 * 2 * 32 + 4 * 32 * 64) * 34 // 32
    assert read.dense == 256 * 64 * 34 // 32 + 2 * (attention + 6 * 64 * 4)
    assert found.named_share(1) == pytest.approx(2 / 6)
    assert found.named_share(2) == pytest.approx(1 - (4 / 6) ** 2)


def test_random_blocks_are_normal_weights():
    """Every type's blocks, read by llama.cpp's own package, spread as the weights do."""
    for kind in ("q4_0", "q8_0", "q4_k", "q6_k"):
        blocks = ggml_blocks.random_blocks(kind)[7:1031]
        quantized = gguf.GGMLQuantizationType(ggml_blocks.TYPES[kind].number)
        found = gguf.dequantize(blocks, quantized)
        exact = ggml_blocks.random_blocks("f32").view(np.float32).reshape(-1, found.shape[1])
        error = np.abs(found - exact[7:1031]).max()
        assert error < (0.001 if kind in ("q8_0",) else 0.012), (kind, error)
        assert found.std() == pytest.approx(0.02, rel=0.05)


def test_a_mixed_file_has_the_types_of_llama_quantize(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16, "head_dim": 64}
    folder = in_folder(tmp_path, **sizes)
    gguf_file.write(tmp_path / "model.gguf", folder, gguf_file.MIXED)
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    six = [i for i in range(16) if types[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert six == [0, 1, 4, 7, 10, 13, 14, 15]
    assert six == [i for i in range(16) if types[f"blk.{i}.attn_v.weight"] == "Q6_K"]
    assert types["token_embd.weight"] == "Q6_K" and types["blk.0.ffn_up.weight"] == "Q4_K"
    with pytest.raises(ValueError, match="token_embd.weight are no whole q6_k blocks"):
        gguf_file.write(tmp_path / "model.gguf", in_folder(tmp_path), gguf_file.MIXED)


def test_a_file_is_written_once(tmp_path):
    folder = in_folder(tmp_path)
    file = tmp_path / "model.gguf"
    read = gguf_file.written(file, folder, "int8")
    file.write_bytes(b"as it was")
    assert gguf_file.written(file, folder, "int8") == read
    assert file.read_bytes() == b"as it was"
    os.utime(file, (0, 0))  # older than its configuration
    gguf_file.written(file, folder, "int8")
    assert file.read_bytes()[:4] == b"GGUF"


def test_a_checkpoint_as_transformers_writes_it(tmp_path, monkeypatch):
    model = in_folder(tmp_path, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    monkeypatch.setattr(checkpoint_file, "_SHARD_BYTES", 100_000)
    size = checkpoint_file.write_checkpoint(tmp_path / "made", model)
    files = sorted((tmp_path / "made").glob("*.safetensors"))
    assert len(files) > 2 and size == sum(file.stat().st_size for file in files)
    index = json.loads((tmp_path / "made/model.safetensors.index.json").read_text())
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                assert index["weight_map"][name] == file.name
                found[name] = opened.get_tensor(name)
    config = AutoConfig.from_pretrained(tmp_path / "made")
    expected = AutoModelForCausalLM.from_config(config).state_dict()
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in expected.items()}
    head = found["lm_head.weight"].float()
    assert head.std() == pytest.approx(0.02, rel=0.1) and abs(head.mean()) < 0.002
    assert found["model.norm.weight"].float().eq(1).all()
    assert checkpoint_file.write_checkpoint(tmp_path / "made", model) == size


def test_a_checkpoint_is_written_once(tmp_path, monkeypatch):
    model = in_folder(tmp_path)
    made = tmp_path / "made"
    index = made / "model.safetensors.index.json"
    monkeypatch.setattr(checkpoint_file, "_SHARD_BYTES", 100_000)
    checkpoint_file.write_checkpoint(made, model)
    many = sorted(made.glob("*.safetensors"))
    many[0].write_bytes(b"as it was")
    expected = sum(file.stat().st_size for file in many)
    assert checkpoint_file.write_checkpoint(made, model) == expected
    assert many[0].read_bytes() == b"as it was"
    monkeypatch.undo()
    os.utime(index, (0, 0))  # older than its configuration
    size = checkpoint_file.write_checkpoint(made, model)
    (file,) = made.glob("*.safetensors")
    assert file.name == "model-00001-of-00001.safetensors" and file.stat().st_size == size
    assert set(json.loads(index.read_text())["weight_map"].values()) == {file.name}


def test_a_checkpoint_of_others_is_left_alone(tmp_path):
    model = in_folder(tmp_path)
    made = tmp_path / "made"
    made.mkdir()
    index = made / "model.safetensors.index.json"
    shard = made / "model-00001-of-00001.safetensors"
    index.write_text(json.dumps({"metadata": {"total_size": 4}, "weight_map": {"a": shard.name}}))
    shard.write_bytes(b"real")
    os.utime(index, (0, 0))
    with pytest.raises(ValueError, match="another checkpoint"):
        checkpoint_file.write_checkpoint(made, model)
    assert shard.read_bytes() == b"real"


def test_the_first_layers_of_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "FOLDER", tmp_path / "peers")
    types = ["full_attention", "sliding_attention"]
    folder = in_folder(tmp_path, layer_types=types)
    made = cpu.cut_layers(folder, 1)
    assert json.loads((made / "config.json").read_text()) == {
        **json.loads((folder / "config.json").read_text()),
        "num_hidden_layers": 1,
        "layer_types": types[:1],
    }
    with pytest.raises(SystemExit, match="--layers needs a folder"):
        cpu.cut_layers(folder / "config.json", 1)


def test_a_level_has_the_sets_of_those_below_it():
    flags = build._flags("avx2")
    assert "-DGGML_NATIVE=OFF" in flags and "-DGGML_FMA=ON" in flags
    assert "-DGGML_AVX512=OFF" in flags and "-DGGML_AMX_INT8=OFF" in flags
    assert {flag for flag in build._flags("amx") if flag.startswith("-DGGML_A")} == {
        f"-DGGML_{name}=ON" for name in build.LEVELS["amx"] if name.startswith("A")
    }
    assert "-DGGML_NATIVE=ON" in build._flags(None)


def test_llama_cpp_of_the_level_of_our_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv("RADIX_CPU_ISA", "avx2")
    with pytest.raises(ValueError, match="python -m bench.peers_cpu.build --level avx2"):
        llama_model._package()
    (tmp_path / "llama-cpp-avx2/llama_cpp").mkdir(parents=True)
    assert llama_model._package() == tmp_path / "llama-cpp-avx2"
    monkeypatch.setenv("RADIX_CPU_ISA", "portable")
    with pytest.raises(ValueError, match="llama.cpp is built for avx2, avx512, avx512_bf16, amx"):
        llama_model._package()
    monkeypatch.delenv("RADIX_CPU_ISA")
    (tmp_path / "llama_cpp").mkdir()
    assert llama_model._package() == tmp_path


def test_a_gguf_file_of_another_kind_of_model_is_refused(tmp_path):
    folder = in_folder(tmp_path, model_type="gpt2")
    with pytest.raises(
        ValueError, match="model_type is gpt2, expected llama or qwen3 or qwen3_moe"
    ):
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
