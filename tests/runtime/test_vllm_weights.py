"""How vLLM's processes come to draw their random weights as our engine draws its own, and which
experts rows choose then."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from bench.gpu_runtime import serving, vllm_weights
from bench.gpu_runtime.contender import Arm, EngineSizes
from bench.gpu_runtime.experts import Spread, spreads
from bench.gpu_runtime.process import ROOT
from bench.gpu_runtime.vllm_engine import Model


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    vllm_weights.write_metadata(tmp_path)
    return tmp_path


def test_a_process_finds_the_plugin(metadata: Path, tmp_path: Path) -> None:
    text = (
        "from importlib.metadata import entry_points\n"
        "(entry,) = [e for e in entry_points(group='vllm.general_plugins') if e.name == NAME]\n"
        "print(entry.load().__module__)\n"
    ).replace("NAME", repr(vllm_weights.LOAD_FORMAT))
    found = subprocess.run(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        env={"PYTHONPATH": vllm_weights.python_path(metadata)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.stdout.strip() == "bench.gpu_runtime.vllm_weights", found.stderr


def test_the_plugin_registers_a_load_format(
    metadata: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With doubles of the two modules of vLLM that it takes."""
    registered: dict[str, Any] = {}

    def register_model_loader(load_format: str) -> Callable[[type], None]:
        return lambda loader: registered.update({load_format: loader})

    package = types.ModuleType("vllm.model_executor.model_loader")
    package.register_model_loader = register_model_loader
    base = types.ModuleType("vllm.model_executor.model_loader.base_loader")
    base.BaseModelLoader = object
    for module in (package, base):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for parent in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    found = importlib.metadata.distributions(path=[str(metadata)])
    (entry,) = [entry for distribution in found for entry in distribution.entry_points]
    assert entry.group == "vllm.general_plugins"
    entry.load()()
    norm = nn.LayerNorm(8)
    norm.weight.data.fill_(float("nan"))
    registered[vllm_weights.LOAD_FORMAT]().load_weights(norm, None)
    assert norm.weight.tolist() == [1] * 8


class _Output:
    """What vLLM gives for one prompt: token t of row r passes experts t + r and t + r + 1."""

    def __init__(self, row: int, prompt: int, length: int, tells: bool) -> None:
        self.token_ids = list(range(length))
        first = np.arange(prompt + length - 1) + row
        ids = np.stack((first, first + 1), axis=-1)[:, None].astype(np.uint8)
        self.routed_experts = ids if tells else None
        self.outputs = [self]


class _Vllm(types.ModuleType):
    """A double of vLLM's package."""

    __version__ = "0"

    def __init__(self) -> None:
        super().__init__("vllm")
        self.options: dict[str, Any] = {}
        self.SamplingParams = types.SimpleNamespace

    def LLM(self, folder: str, **options: Any) -> _Vllm:
        self.options = options
        return self

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[_Output]:
        tells = self.options.get("enable_return_routed_experts", False)
        lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
        return [
            _Output(row=row, prompt=length, length=param.max_tokens, tells=tells)
            for row, (length, param) in enumerate(zip(lengths, params, strict=True))
        ]


def _engine(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> tuple[_Vllm, Any]:
    vllm = _Vllm()
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("PYTHONPATH", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")  # and as it was after the test
    return vllm, Model(folder=Path("folder"), sizes=EngineSizes(ranks=2), settings=settings)


def test_the_arm_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, model = _engine(monkeypatch, {"enable_return_routed_experts": True})
    assert vllm.options["load_format"] == vllm_weights.LOAD_FORMAT
    assert vllm.options["tensor_parallel_size"] == 2
    assert model.version.endswith("weights like_radix")
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert vllm_weights.LOAD_FORMAT in entries.names
    assert model.generate([[1, 2], [3]], [4, 2], 0.0) == 6
    ids = model.chosen_experts([[1, 2], [3, 4], [5, 6]], 4, 0.6)
    assert ids.shape == (3, 1, 3, 2)
    assert ids[0, 0].tolist() == [[2, 3], [3, 4], [4, 5]]
    assert ids[2, 0, 0].tolist() == [4, 5]


def test_the_arm_of_vllm_with_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, model = _engine(monkeypatch, {"load_format": "dummy"})
    assert vllm.options["load_format"] == "dummy"
    assert model.version.endswith("weights dummy")
    with pytest.raises(RuntimeError, match="enable_return_routed_experts is off"):
        model.chosen_experts([[1]], 2, 0.6)


def test_servers_have_random_weights_drawn_alike(tmp_path: Path) -> None:
    for engine, expected in (("radix", "dummy"), ("vllm", vllm_weights.LOAD_FORMAT)):
        command = serving._command(Arm.parse(engine), tmp_path, EngineSizes())
        assert command[command.index("--load-format") + 1] == expected


def test_spreads_of_layers_and_steps() -> None:
    ids = np.array(
        [
            [[[0, 0], [0, 0]], [[0, 1], [1, 2]]],
            [[[0, 0], [0, 0]], [[3, 0], [0, 3]]],
        ]
    )
    assert spreads(ids) == [Spread(layer=1, used=2.5, busiest=2)]


def test_which_experts_our_engine_chooses(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 160,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "bench.gpu_runtime.experts", str(tmp_path)]
    arm = "radix:device=cpu,max_total_tokens=8192,num_threads=1"
    found = subprocess.run(
        [*command, "--arm", arm, "--rows", "32"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    used = [float(line.split()[2]) for line in lines if line.startswith("layer ")]
    assert len(used) == 2
    assert 12 < min(used) <= 16
    assert lines[-1] == f"32 rows: at least {min(used):.1f} experts a layer and step"
