"""What `radix doctor` tells of the benches' models, beside what models of their shapes hold once
they are loaded."""

from __future__ import annotations

import json
import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from radix_runtime import Engine
from radix_runtime.config import ServerArgs
from radix_runtime.device import Device, Memory
from radix_runtime.engine.facts import engine_facts
from radix_runtime.engine.planned_model import PlannedModel
from radix_runtime.model_config import ModelConfig
from radix_runtime.specs import Moe
from tests.runtime.command import Run

MODELS = Path(__file__).resolve().parents[2] / "bench/serving/models"
NAMES = sorted(folder.name for folder in MODELS.iterdir())
MOST_APART = 0.03

# What the checkpoints of these names have, in billions.
PARAMETERS = {
    "dsv2-lite": 15.7, "gpt-oss-20b": 20.9, "gpt-oss-20b-mxfp4": 20.9, "llama-3.2-1b": 1.24,
    "llama3-70b": 70.6, "llama3-70b-fp8": 70.6, "llama3-70b-fp8-channel": 70.6,
    "llama3-8b-awq": 8.03, "llama3-8b-fp8-block": 8.03, "llama3-8b-fp8-channel": 8.03,
    "llama3-8b-gptq": 8.03, "llama3-8b-w8a8": 8.03, "qwen3-30b-a3b-fp8": 30.5,
    "llama3-8b": 8.03, "qwen3-0.6b": 0.596, "qwen3-14b": 14.8, "qwen3-30b-a3b": 30.5,
    "qwen3-8b": 8.19,
}  # fmt: skip

# What takes long, or differs from others in its size alone: with RADIX_TEST_FULL=1.
_FULL = bool(os.environ.get("RADIX_TEST_FULL"))
_ASKED = [name for name in NAMES if _FULL or name != "qwen3-30b-a3b-fp8"]
_QUANTIZED_AT_LOAD = NAMES if _FULL else ["dsv2-lite", "gpt-oss-20b", "llama3-8b", "qwen3-30b-a3b"]

# Sizes that are cut to a fraction, so that a few layers load in a second.
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_LAYERS = 3
_CONTEXT = 512


def contents(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODELS / name / "config.json").read_text())
    return found


def small(name: str, folder: Path) -> Path:
    """A folder with the configuration of a model of the same shape, in three layers a fraction as
    wide."""
    config = contents(name)
    fraction = 16 if config["hidden_size"] >= 8192 else 8
    for key in _WIDTHS:
        if key in config:
            config[key] //= fraction
    for key in _HEADS:
        config[key] = max(1, config[key] // fraction)
    config["num_hidden_layers"] = _LAYERS
    config["max_position_embeddings"] = _CONTEXT
    if config.get("quantization_config", {}).get("quant_method") == "mxfp4":
        for key in _WIDTHS[:2]:
            config[key] = config[key] // 32 * 32  # whole blocks
    config.pop("max_window_layers", None)
    scaling = config["rope_scaling"] or {}
    if "original_max_position_embeddings" in scaling:  # from which the context is told
        scaling["original_max_position_embeddings"] = int(_CONTEXT / scaling["factor"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def has_experts(name: str) -> bool:
    spec = ModelConfig.from_dict(contents(name)).spec
    return any(isinstance(layer.feed_forward, Moe) for layer in spec.layers)


def log_probabilities(engine: Engine) -> list[float]:
    """Of some tokens that random weights give: no scale of random codes makes them overflow."""
    settings = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    (output,) = engine.generate(
        input_ids=[[3, 1, 4, 1, 5]], sampling_params=settings, return_logprob=True
    )
    return [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]


def cases() -> list[Any]:
    """Each shape as its file says; the formats that are made at load where there is no other."""
    found = []
    for name in NAMES:
        formats: list[str | None] = [None]
        if name in _QUANTIZED_AT_LOAD and "quantization_config" not in contents(name):
            formats += ["int8", "int4"]
        found += [pytest.param(name, each, id=f"{name}-{each or 'file'}") for each in formats]
    return found


@pytest.mark.parametrize(("name", "quantization"), cases())
def test_what_is_told_is_what_is_held(name: str, quantization: str | None, tmp_path: Path) -> None:
    folder = small(name, tmp_path)
    chosen: dict[str, Any] = {"quantization": quantization, "load_format": "dummy"}
    args = ServerArgs(model_path=str(folder), device="cpu", **chosen)
    planned = PlannedModel(ModelConfig.from_dir(folder), args=args, folder=None)
    limits = {"max_total_tokens": _CONTEXT, "num_threads": 1, "skip_tokenizer_init": True}
    with Engine(folder, device="cpu", **limits, **chosen) as engine:
        facts = engine_facts(engine.executor.runner)
        slots = (engine.executor.num_pages + 1) * engine.executor.page_size  # and the dummy page
        assert all(map(math.isfinite, log_probabilities(engine)))
    held = int(str(facts["weight_bytes"]))
    told = planned.size().bytes
    print(f"{name} {quantization}: told {told}, held {held}, {told / held - 1:+.2%}")
    assert abs(told / held - 1) < MOST_APART
    assert planned.token_bytes() * slots == int(str(facts["kv_cache_bytes"]))


@pytest.mark.parametrize("name", _ASKED)
def test_doctor_knows_every_model_of_the_benches(
    name: str, here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(available=1 << 40, total=1 << 40)
    monkeypatch.setattr(Device, "memory", lambda self: memory)
    done = here("doctor", str(MODELS / name / "config.json"), "--device", "cpu")
    assert done.returncode == 0, done.stdout
    rows = dict(line.strip().partition("  ")[::2] for line in done.stdout.splitlines())
    count, unit = rows["parameters"].split(",")[0].strip().split()
    billions = float(count) / (1000 if unit == "M" else 1)
    assert billions == pytest.approx(PARAMETERS[name], rel=0.01)
    assert "unknown keys" not in rows
    assert ("experts" in rows["model"]) == has_experts(name)
    assert rows["fits"].strip().startswith("yes")
