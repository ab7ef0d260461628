"""examples/plugin_quantization, installed: a format of another package, with block scales and
packed rows, against transformers' model of what its codes stand for."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radix_runtime import Engine
from radix_runtime.config import ServerArgs
from radix_runtime.errors import ConfigError
from radix_runtime.prepare import prepare_model
from radix_runtime.quantization.registry import quantizations
from tests.runtime import quantized_models as q
from tests.runtime.model_steps import ThreadCommunicator, run_ranks, worst_error
from tests.runtime.tiny_models import Driver, save

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5
LEFT_OUT = ["layers.1.self_attn.o_proj"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which pip has installed the package."""
    copy = tmp_path_factory.mktemp("package") / "plugin_quantization"
    shutil.copytree(ROOT / "examples" / "plugin_quantization", copy)
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    if importlib.util.find_spec("hatchling"):
        command.append("--no-build-isolation")
    subprocess.run([*command, "--target", str(target), str(copy)], check=True, timeout=250)
    return target


@pytest.fixture
def make(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], q.Checkpoint]:
    """A model -> its toy4 checkpoint, by the package's own converter, and what it stands for."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(quantizations, "_items", dict(quantizations._items))

    def write(name: str) -> q.Checkpoint:
        from radix_toy4.convert import convert, quantize

        save(q.random_model(name), tmp_path / "float32")
        convert(tmp_path / "float32", tmp_path / "toy4", LEFT_OUT)

        def widened(weight: torch.Tensor) -> tuple[q.Tensors, torch.Tensor]:
            words, scales = quantize(weight)
            shifts = 4 * torch.arange(8)
            codes = (words[..., None] >> shifts & 15).flatten(1).float() - 8
            rows, columns = weight.shape
            spread = scales.float().repeat_interleave(16, 0).repeat_interleave(32, 1)
            return {"weight": weight}, codes * spread[:rows, :columns]

        products = rf"^(?!.*layers\.1\.self_attn\.o_proj).*{q.PRODUCTS}"
        made = q.write(q.random_model(name), tmp_path / "reference", widened, {}, products=products)
        return q.Checkpoint(folder=tmp_path / "toy4", reference=made.reference)

    return write


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["llama", "llama_odd_heads", "qwen3_moe", "qwen3_moe_odd"])
def test_logits(make: Any, model: str, ranks: int) -> None:
    made = make(model)

    def work(comm: ThreadCommunicator) -> float:
        driver = Driver(made.folder, communicator=comm)
        layers = driver.model.model.layers
        assert type(layers[0].self_attn.o_proj.method).__module__ == "radix_toy4.method"
        assert type(layers[1].self_attn.o_proj.method).__name__ == "DenseMethod"
        return worst_error(driver, made.reference, seed=1)

    assert 0 < run_ranks(ranks, work)[0] < TOLERANCE


def test_the_engine_serves_it(make: Any) -> None:
    made = make("llama")
    prepared = prepare_model(ServerArgs(model_path=str(made.folder), skip_tokenizer_init=True))
    assert prepared.args.quantization == "toy4"
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    with Engine(str(made.folder), skip_tokenizer_init=True, max_total_tokens=256) as engine:
        output = engine.generate(input_ids=[[3, 4, 5]], sampling_params=params)
    assert len(output[0]["output_ids"]) == 6


def test_dummy_weights(make: Any) -> None:
    made = make("llama")
    args = ServerArgs(model_path=str(made.folder), load_format="dummy")
    product = Driver(made.folder, args=args).model.model.layers[0].self_attn.o_proj
    weight = product.method.apply(product, torch.eye(256))
    assert 0.01 < float(weight.std()) < 0.04


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("codes", torch.zeros(256, 31, dtype=torch.int32), r"has shape \[256, 31\], expected \[25"),
        ("block_scales", torch.zeros(256, 8).half(), r"has shape \[256, 8\], expected \[16, 8\]"),
        ("codes", torch.zeros(256, 32), "holds float32, expected int32"),
        ("block_scales", torch.full((16, 8), float("nan")).half(), "a scale that is not finite"),
    ],
)
def test_what_the_runtime_checks_for_it(
    make: Any, suffix: str, value: torch.Tensor, message: str
) -> None:
    made = make("llama")
    file = made.folder / "model.safetensors"
    key = f"model.layers.0.self_attn.o_proj.{suffix}"
    save_file({**load_file(file), key: value}, file)
    with pytest.raises(ConfigError, match=rf"o_proj\.\w+.* {message}"):
        Driver(made.folder)


def test_an_unknown_type_of_setting(make: Any) -> None:
    made = make("llama")
    config = json.loads((made.folder / "config.json").read_text())
    config["quantization_config"]["left_out"] = "o_proj"
    (made.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantization_config: Expected `array`"):
        Driver(made.folder)
