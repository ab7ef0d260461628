"""MXFP4 checkpoints that are broken, or disagree with their configuration: one line that names the
file and the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import radix_kernels
from radix_runtime.errors import ConfigError
from tests.runtime.mxfp4_models import SETTINGS, write
from tests.runtime.quantized_models import Tensors
from tests.runtime.tiny_models import Driver

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(
    radix_kernels.capabilities()["backend"] != "cpu", reason="integer codes are for the CPU"
)
# Of a model of hidden size 64 with six experts of width 64.
EXPERTS = "model.layers.0.mlp.experts"
GATE_UP = f"{EXPERTS}.gate_up_proj"
DOWN = f"{EXPERTS}.down_proj"


@dataclass(frozen=True)
class Bad:
    """`key`: the tensor that `change` makes another of, or drops (None). `config`: keys of
    config.json that change. `message`: a part of what is said."""

    name: str
    message: str
    key: str = ""
    change: Callable[[torch.Tensor], torch.Tensor] | None = None
    config: dict[str, Any] | None = None


def case(name: str, message: str, **changes: Any) -> Bad:
    return Bad(name=name, message=message, **changes)


def with_value(place: tuple[int, ...], value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return change


def one_more(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The last element along `dim` once more."""
    return lambda tensor: torch.cat((tensor, tensor.narrow(dim, -1, 1)), dim)


BAD = [
    case("no blocks", f"no tensor for {EXPERTS}.0.gate_proj.blocks, ", key=f"{GATE_UP}_blocks"),
    case("no scales", f"no tensor for {EXPERTS}.0.down_proj.scales, ", key=f"{DOWN}_scales"),
    case("no biases", f"no tensor for {EXPERTS}.0.down_proj.bias, ", key=f"{DOWN}_bias"),
    case("scales of a block too many",
        f"{GATE_UP}_scales (here {EXPERTS}.0.gate_proj.scales, [6, 128, 3] in the file) "
        "has shape [64, 3], expected [64, 2]",
        key=f"{GATE_UP}_scales", change=one_more(2)),
    case("scales of all blocks in a row",
        f"{DOWN}_scales has shape [6, 128], expected [experts, outputs, blocks]",
        key=f"{DOWN}_scales", change=lambda scales: scales.flatten(1)),
    case("scales of an output too many", "has shape [65, 2], expected [64, 2]",
        key=f"{DOWN}_scales", change=one_more(1)),
    case("a block too many",
        f"{GATE_UP}_blocks (here {EXPERTS}.0.gate_proj.blocks, [6, 128, 3, 16] in the file) "
        "has shape [64, 48], expected [64, 32]",
        key=f"{GATE_UP}_blocks", change=one_more(2)),
    case("blocks of 16 inputs",
        f"{DOWN}_blocks has shape [6, 64, 4, 8], expected [experts, outputs, blocks, 16]",
        key=f"{DOWN}_blocks", change=lambda blocks: blocks.unflatten(3, (2, 8)).flatten(2, 3)),
    case("an odd number of rows", "expected an even number of rows",
        key=f"{GATE_UP}_blocks", change=one_more(1)),
    case("an expert too many", "_blocks (here model.layers.0.mlp.experts.6.down_proj.blocks",
        key=f"{DOWN}_blocks", change=one_more(0)),
    case("an expert too few", f"no tensor for {EXPERTS}.5.down_proj.scales",
        key=f"{DOWN}_scales", change=lambda scales: scales[:5]),
    case("a scale that is NaN",
        f"{GATE_UP}_scales (here {EXPERTS}.2.gate_proj.scales, [6, 128, 2] in the file) "
        "has a scale of 255, which is NaN",
        key=f"{GATE_UP}_scales", change=with_value((2, 5, 1), 255)),
    case("a weight beyond float32",
        f"{DOWN}_scales (here {EXPERTS}.3.down_proj.scales, [6, 64, 2] in the file) "
        "has a scale of 253, with which 6 is too large for float32",
        key=f"{DOWN}_scales", change=with_value((3, 5, 1), 253)),
    case("scales that are floats", "holds float32, expected uint8",
        key=f"{DOWN}_scales", change=lambda scales: scales.float()),
    case("blocks of another type", "holds int8, expected uint8",
        key=f"{DOWN}_blocks", change=lambda blocks: blocks.view(torch.int8)),
    case("a width of half a block", f"{EXPERTS}.0.down_proj: 48 inputs are no whole MXFP4 blocks",
        config={"intermediate_size": 48}),
    case("a configuration without MXFP4", "has no place in this model",
        config={"quantization_config": None}),
    case("experts that are left out", "has no place in this model",
        config={"quantization_config": {**SETTINGS, "modules_to_not_convert": [EXPERTS]}}),
    case("a list that is none", "quantization_config: Expected `array",
        config={"quantization_config": {**SETTINGS, "modules_to_not_convert": "lm_head"}}),
]  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("mxfp4"), 64).folder


def make(bad: Bad, original: Path, folder: Path) -> None:
    tensors: Tensors = load_file(original / "model.safetensors")
    if bad.key:
        tensor = tensors.pop(bad.key)
        if bad.change is not None:
            tensors[bad.key] = bad.change(tensor).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((original / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **(bad.config or {})}))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Driver(folder)
    return str(caught.value)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_checkpoint(bad: Bad, original: Path, tmp_path: Path) -> None:
    make(bad, original, tmp_path)
    message = refusal(tmp_path)
    print(message.replace(str(tmp_path), ""))
    assert bad.message in message
    assert "\n" not in message and len(message) < 500
    if bad.change is not None and not bad.message.startswith("no tensor"):
        assert str(tmp_path / "model.safetensors") in message


def test_floats_in_place_of_codes(tmp_path: Path) -> None:
    layers = tuple(f"model.layers.{i}" for i in range(4))
    write(tmp_path, 64, left_out=layers)
    message = refusal(tmp_path)
    assert f"{DOWN} (here {EXPERTS}.0.down_proj.weight" in message
    assert "has no place in this model" in message
