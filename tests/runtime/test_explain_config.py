"""`radix serve --explain-config` refuses what a start would refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from radix_runtime import hub
from radix_runtime.errors import EXIT_CONFIG
from radix_runtime.hub import DEMO_MODEL_DIR
from tests.runtime.command import Run, radix
from tests.runtime.family_models import random_model
from tests.runtime.tiny_models import save


def another_architecture(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["Odd"]}))


def another_type(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, file)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def a_smaller_model(folder: Path) -> None:
    """Random weights, and fewer of them than the tokenizer has tokens."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 100}))


def nothing(folder: Path) -> None:
    """The model is not at fault."""


@pytest.mark.parametrize(
    ("spoil", "flags", "message"),
    [
        (another_architecture, "", "architecture ['Odd'] is not supported"),
        (another_type, "", "holds int8, expected bfloat16"),
        (no_weights, "", "holds no model.safetensors"),
        (a_smaller_model, "--load-format dummy", "they do not belong together"),
        (nothing, "--context-length 4096", "--context-length 4096 exceeds the model's 2048"),
        (nothing, "--fp8-fast-accum", "--fp8-fast-accum: no product of this model is FP8"),
        (nothing, "--quantization awq", "the checkpoint is not quantized"),
        (nothing, "--api-key-file absent", "--api-key-file: [Errno 2]"),
    ],
)
def test_what_a_start_refuses(
    spoil: Callable[[Path], None], flags: str, message: str, here: Run, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model"))
    spoil(folder)
    command = ("serve", str(folder), "--device", "cpu", *flags.split())
    explained = here(*command, "--explain-config")
    assert explained.returncode == EXIT_CONFIG and not explained.stdout
    assert message in explained.stderr and explained.stderr.count("\n") == 1
    started = radix(*command, "--port", "0", "--num-threads", "1")
    assert started.returncode == EXIT_CONFIG
    assert started.stderr.splitlines(keepends=True)[-1] == explained.stderr


def test_what_another_rank_holds_alone_is_looked_at_too(here: Run, tmp_path: Path) -> None:
    """Of five experts of a width that two ranks do not divide the last is rank 1's."""
    save(random_model("qwen3_moe_odd_width"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int32)}, file, metadata={"format": "pt"})
    flags = ("--tp-size", "2", "--skip-tokenizer-init", "--device", "cpu", "--explain-config")
    explained = here("serve", str(tmp_path), *flags)
    assert explained.returncode == EXIT_CONFIG, explained.stdout
    assert f"{name} holds int32, expected float32" in explained.stderr


def test_weights_that_are_not_here_are_not_fetched(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of the hub the configuration is enough."""
    folder = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model"))
    no_weights(folder)
    fetched = []

    def download(name: str, patterns: list[str], **_: object) -> Path:
        fetched.append(patterns)
        return folder

    monkeypatch.setattr(hub, "_download", download)
    done = here("serve", "owner/model", "--explain-config", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "--attention-backend" in done.stdout
    assert fetched == [hub._METADATA_FILES]
