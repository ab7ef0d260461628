"""Latent attention in GGUF files: the product to keys and values in one tensor or in two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from radix_runtime.errors import ConfigError
from radix_runtime.gguf.views import JoinedHeads
from radix_runtime.model_config import ModelConfig
from radix_runtime.specs import GroupedSoftmaxRouter, Mla, Moe
from tests.runtime import gguf_files
from tests.runtime.gguf_files import CASES, as_codes, as_floats, gguf_model, write_gguf
from tests.runtime.model_steps import ThreadCommunicator, run_ranks, worst_error
from tests.runtime.tiny_models import Driver

torch.set_num_threads(1)
TOLERANCE = 1e-5
LATENT = ["deepseek2_lite", "deepseek2_of_2024", "deepseek3"]


@pytest.mark.parametrize("name", LATENT)
def test_codes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = gguf_model(case)
    path = write_gguf(tmp_path / "model.gguf", case, model, as_codes("Q8_0", "Q5_0", "Q4_1"))
    assert worst_error(Driver(path), model, seed=5) < TOLERANCE


@pytest.mark.parametrize("name", LATENT)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = gguf_model(case)
    path = write_gguf(tmp_path / "model.gguf", case, model, as_codes("Q8_0"))

    def work(comm: ThreadCommunicator) -> float:
        return worst_error(Driver(path, communicator=comm), model, seed=6)  # type: ignore[arg-type]

    assert 0 < run_ranks(2, work)[0] < TOLERANCE


def test_a_file_that_does_not_say_how_experts_are_chosen(tmp_path: Path) -> None:
    """By their softmax, as llama.cpp has it."""
    path = write_gguf(
        tmp_path / "model.gguf", CASES["deepseek2_lite"], gguf_model(CASES["deepseek2_lite"]),
        as_floats(),
    )  # fmt: skip
    layer = ModelConfig.from_dir(path).spec.layers[1]
    assert isinstance(layer.mixer, Mla) and isinstance(layer.feed_forward, Moe)
    scaling = float(np.float32(1.7))  # as files hold it
    assert layer.feed_forward.router == GroupedSoftmaxRouter(top_k=3, scaling=scaling)


@pytest.mark.parametrize(("start", "stop"), [(0, 40), (0, 10), (7, 33), (10, 20), (39, 40), (5, 5)])
def test_rows_of_joined_heads(start: int, stop: int) -> None:
    """Four heads of six keys and four values."""
    whole = torch.randn(4, 10, 8, generator=torch.Generator().manual_seed(start))
    keys, values = whole.split([6, 4], dim=1)
    view = JoinedHeads(Held(keys.transpose(1, 2)), Held(values))
    assert view.get_shape() == [40, 8]
    assert torch.equal(view[start:stop], whole.flatten(0, 1)[start:stop])
    assert torch.equal(view[start:stop, 3:5], whole.flatten(0, 1)[start:stop, 3:5])


class Held:
    """A tensor in memory as a source."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: object) -> torch.Tensor:
        return self._tensor[index]  # type: ignore[index]


def spoilt(path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose second part is left out, or has another shape."""
    add = gguf.GGUFWriter.add_tensor

    def changed(self: gguf.GGUFWriter, name: str, tensor: np.ndarray, **options: object) -> None:
        if name == "blk.1.attn_v_b.weight":
            if change == "missing":
                return
            tensor = tensor[:2] if change == "fewer heads" else tensor[0]
        add(self, name, tensor, **options)

    monkeypatch.setattr(gguf_files.GGUFWriter, "add_tensor", changed)
    case = replace(CASES["deepseek2_lite"])
    return write_gguf(path, case, gguf_model(case), as_floats())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "tensor 'blk.1.attn_v_b.weight' is missing"),
        ("fewer heads", r"blk.1.attn_k_b.weight has shape \[4, 64, 32\], which does not fit that"),
        ("a matrix", "blk.1.attn_k_b.weight and blk.1.attn_v_b.weight must have three dimensions"),
    ],
)
def test_parts_that_do_not_belong_together(
    change: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spoilt(tmp_path / "model.gguf", change, monkeypatch)
    with pytest.raises(ConfigError, match=message) as caught:
        Driver(path)
    assert str(path) in str(caught.value)
