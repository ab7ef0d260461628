"""`radix doctor MODEL`: what it says of a model before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radix_runtime import Engine
from radix_runtime.config import ServerArgs
from radix_runtime.device import Device, Memory
from radix_runtime.engine.facts import engine_facts
from radix_runtime.engine.planned_model import PlannedModel
from radix_runtime.errors import EXIT_CONFIG, ConfigError
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.model_config import ModelConfig
from tests.runtime.command import Run
from tests.runtime.gguf_files import CASES, as_codes, gguf_model, write_gguf

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
}  # fmt: skip


def rows(text: str) -> dict[str, str]:
    """The table, by the names of its rows."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.strip().partition("  ")
        found[name] = value.strip()
    return found


def has_memory(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    memory = Memory(available=int(gib * 2**30), total=int(gib * 2**30))
    monkeypatch.setattr(Device, "memory", lambda self: memory)


def config_file(folder: Path, **changes: Any) -> str:
    path = folder / "llama.json"
    path.write_text(json.dumps({**LLAMA_8B, **changes}))
    return str(path)


def test_a_configuration_alone(here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_memory(monkeypatch, 32)
    done = here("doctor", config_file(tmp_path), "--device", "cpu")
    said = rows(done.stdout)
    assert done.returncode == 0, done.stdout
    assert "LlamaForCausalLM" in said["model"] and "32 x (attention, MLP of 14336)" in said["model"]
    assert said["parameters"] == "8.03 B, no weights here"
    assert said["weights of a rank"].startswith("TP 1 14.96 GiB, TP 2 7.48 GiB, TP 4 3.74 GiB")
    assert said["KV cache"] == "128 KiB a token: 2048 tokens 256.0 MiB, 8192 tokens 1.00 GiB"
    assert said["fits"].startswith("yes, with up to ")
    assert said["linear"].startswith(("cpu", "reference"))


def test_what_would_make_it_fit(here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = config_file(tmp_path)
    has_memory(monkeypatch, 12)
    done = here("doctor", model, "--device", "cpu")
    assert done.returncode == EXIT_CONFIG and rows(done.stdout)["fits"] == "no"
    assert "problem: weights and 2048 tokens take 15.21 GiB, 11.40 GiB are free" in done.stdout
    remedy = "remedy: --quantization int8 (8.04 GiB) or --quantization int4 (5.20 GiB)"
    assert remedy.split(" (")[0] in done.stdout and "--quantization int4" in done.stdout
    done = here("doctor", model, "--device", "cpu", "--quantization", "int4")
    assert done.returncode == 0
    has_memory(monkeypatch, 2)
    done = here("doctor", model, "--device", "cpu")
    assert "remedy: use a machine with more memory, or a smaller model" in done.stdout


def test_a_context_that_does_not_fit(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_memory(monkeypatch, 18)
    done = here("doctor", config_file(tmp_path, max_position_embeddings=131072), "--device", "cpu")
    assert done.returncode == 0
    assert "of a context of 131072" in rows(done.stdout)["fits"]


def test_errors_are_problems(here: Run, tmp_path: Path) -> None:
    done = here("doctor", config_file(tmp_path, architectures=["GPT2LMHeadModel"]))
    assert done.returncode == EXIT_CONFIG
    assert "problem: config.json: architecture ['GPT2LMHeadModel'] is not supported" in done.stdout
    done = here("doctor", str(tmp_path / "absent.gguf"))
    assert done.returncode == EXIT_CONFIG and "there is no file" in done.stdout
    assert "reinstall" not in done.stdout
    done = here("doctor", "--device", "cuda")
    assert done.returncode == EXIT_CONFIG and "--device is of a model" in done.stderr
    done = here("doctor", config_file(tmp_path, frobnicate=1), "--device", "cpu")
    assert rows(done.stdout)["unknown keys"] == "frobnicate"


def write_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def lose_a_shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {key: f"part-{i % 2}.safetensors" for i, key in enumerate(tensors)}
    kept = {key: tensor for key, tensor in tensors.items() if names[key] == "part-0.safetensors"}
    save_file(kept, folder / "part-0.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


NORM = "model.layers.0.input_layernorm.weight"
PRODUCT = "model.layers.1.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing tensor": (
        lambda folder: write_tensors(folder, lambda held: held.pop(PRODUCT)),
        f"no tensor for {PRODUCT}",
    ),
    "extra tensor": (
        lambda folder: write_tensors(folder, lambda held: held.update(odd=torch.zeros(1))),
        "odd has no place in this model",
    ),
    "shape of a product": (
        lambda folder: write_tensors(
            folder, lambda held: held.update({PRODUCT: held[PRODUCT][1:].contiguous()})
        ),
        f"{PRODUCT} has shape [",
    ),
    "shape of a norm": (
        lambda folder: write_tensors(
            folder, lambda held: held.update({NORM: held[NORM][1:].contiguous()})
        ),
        f"{NORM} has shape [",
    ),
    "type": (
        lambda folder: write_tensors(
            folder, lambda held: held.update({PRODUCT: held[PRODUCT].to(torch.int8)})
        ),
        f"{PRODUCT} holds int8, expected bfloat16",
    ),
    "missing shard": (lose_a_shard, "part-1.safetensors does not exist"),
    "another format": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "pytorch_model.bin is of another format",
    ),
}


def test_other_files_of_a_folder_are_no_weights(here: Run, tmp_path: Path) -> None:
    Path(config_file(tmp_path)).rename(tmp_path / "config.json")
    (tmp_path / "training_args.bin").write_bytes(b"0")
    done = here("doctor", str(tmp_path), "--device", "cpu")
    assert rows(done.stdout)["parameters"] == "8.03 B, no weights here"


@pytest.mark.parametrize("damage", DAMAGES)
def test_doctor_and_engine_refuse_files_in_the_same_words(
    damage: str, here: Run, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model"))
    spoil, expected = DAMAGES[damage]
    spoil(folder)
    check_same_words(here, folder, expected)


def test_doctor_and_engine_refuse_a_gguf_file_in_the_same_words(here: Run, tmp_path: Path) -> None:
    case = CASES["llama"]
    model = gguf_model(case)
    model.model.layers[1].mlp.up_proj.weight.data = torch.zeros(128, 256)
    path = write_gguf(tmp_path / "model.gguf", case, model, as_codes("Q8_0"))
    check_same_words(here, path, "blk.1.ffn_up.weight")


def check_same_words(here: Run, model: Path, expected: str) -> None:
    done = here("doctor", str(model), "--device", "cpu")
    assert done.returncode == EXIT_CONFIG
    with pytest.raises(ConfigError) as caught:
        Engine(model, device="cpu")
    assert expected in str(caught.value)
    assert done.stdout.splitlines()[-1] == f"problem: {caught.value}"


def check_against_engine(model: Path, **settings: Any) -> None:
    """The size that is told is that of the loaded model, within 3 %."""
    args = ServerArgs(model_path=str(model), device="cpu", **settings)
    planned = PlannedModel(ModelConfig.from_dir(model), args=args, folder=model)
    limits = {"max_total_tokens": planned.config.max_context, "num_threads": 1}
    with Engine(model, device="cpu", **limits, **settings) as engine:
        facts = engine_facts(engine.executor.runner)
        pages = engine.executor.num_pages + 1  # and the dummy page
        token_bytes = int(str(facts["kv_cache_bytes"])) / pages / engine.executor.page_size
    held = int(str(facts["weight_bytes"]))
    assert planned.token_bytes() == token_bytes
    assert abs(planned.size().bytes / held - 1) < 0.03, (planned.size().bytes, held)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_size_of_the_demo_model(quantization: str | None) -> None:
    check_against_engine(DEMO_MODEL_DIR, quantization=quantization)


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_the_size_of_a_gguf_file(name: str, tmp_path: Path, here: Run) -> None:
    model = gguf_model(CASES[name])
    quantize = as_codes("Q4_K", "Q8_0", "Q6_K", "Q4_0")
    path = write_gguf(tmp_path / "model.gguf", CASES[name], model, quantize)
    check_against_engine(path)
    said = rows(here("doctor", str(path), "--device", "cpu").stdout)
    assert said["format"].startswith("gguf (") and "Q4_K" in said["format"]
    assert said["parameters"].endswith("of files")
