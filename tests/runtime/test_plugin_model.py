"""examples/plugin_model, installed: a model of another package, against transformers."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from radix_runtime.errors import ConfigError
from radix_runtime.families import families
from radix_runtime.model_config import ModelConfig
from radix_runtime.models.loader import models
from radix_runtime.specs import LayerNorm
from tests.child import IMPORT_PATH
from tests.runtime.model_steps import ThreadCommunicator, run_ranks, worst_error
from tests.runtime.tiny_models import Driver, Sequence, random_ids, save

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which pip has installed the package."""
    copy = tmp_path_factory.mktemp("package") / "plugin_model"
    shutil.copytree(ROOT / "examples" / "plugin_model", copy)
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    if importlib.util.find_spec("hatchling"):
        command.append("--no-build-isolation")
    subprocess.run([*command, "--target", str(target), str(copy)], check=True, timeout=250)
    return target


@pytest.fixture(scope="module")
def reference() -> Any:
    """Every parameter is random."""
    config = transformers.Cohere2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=160,
        max_position_embeddings=256,
        sliding_window=9,
        logit_scale=0.3,
        attention_bias=True,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
        sliding_window_pattern=3,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Cohere2ForCausalLM(config)
    with torch.no_grad():
        for key, param in model.named_parameters():
            param.normal_(1.0 if "norm" in key else 0.0, 0.15)
    return model.float().eval()


@pytest.fixture
def folder(site: Path, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint, with the package installed."""
    monkeypatch.syspath_prepend(str(site))
    for registry in (families, models):
        monkeypatch.setattr(registry, "_items", dict(registry._items))
    return save(reference, tmp_path)


@pytest.mark.parametrize("page_size", [1, 16])
def test_logits(folder: Path, reference: Any, page_size: int) -> None:
    driver = Driver(folder, page_size=page_size)
    assert type(driver.model).__module__ == "radix_cohere2.model"
    assert driver.config.unknown_keys == ()
    assert 0 < worst_error(driver, reference, seed=page_size) < TOLERANCE


def test_two_ranks(folder: Path, reference: Any) -> None:
    def work(comm: ThreadCommunicator) -> float:
        driver = Driver(folder, communicator=comm)
        return worst_error(driver, reference, seed=3)

    assert 0 < run_ranks(2, work)[0] < TOLERANCE


def test_bfloat16(folder: Path) -> None:
    driver = Driver(folder, dtype=torch.bfloat16)
    ids = random_ids(driver.config, 20, seed=1)
    logits = driver.step([(Sequence(0, ids), 20)])
    assert logits is not None and bool(logits.isfinite().all())


def test_without_the_package(reference: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cohere2ForCausalLM.* is not supported"):
        ModelConfig.from_dir(save(reference, tmp_path))


def test_defaults_are_those_of_transformers(folder: Path) -> None:
    raw = {
        "architectures": ["Cohere2ForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 512,
    }
    ours = ModelConfig.from_dict(raw).spec
    theirs = transformers.Cohere2Config(**raw)
    assert ours.final_norm == LayerNorm(eps=theirs.layer_norm_eps)
    assert ours.logit_multiplier == theirs.logit_scale and ours.tied_head
    sliding = [layer.mixer.window == theirs.sliding_window for layer in ours.layers]
    assert sliding == [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [layer.mixer.rope is not None for layer in ours.layers] == sliding


def test_the_names_of_a_loaded_family(folder: Path) -> None:
    ModelConfig.from_dir(folder)
    assert families.names().count("Cohere2ForCausalLM") == 1


def test_the_family_loads_no_torch(site: Path, folder: Path) -> None:
    code = (
        "import sys; from radix_runtime.model_config import ModelConfig; "
        f"print(ModelConfig.from_dir({json.dumps(str(folder))}).architecture); "
        "assert 'radix_cohere2.family' in sys.modules; assert 'torch' not in sys.modules"
    )
    env = {"PYTHONPATH": f"{site}:{IMPORT_PATH}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "Cohere2ForCausalLM", done.stderr
