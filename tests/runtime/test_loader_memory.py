"""What a load holds beside the weights: sources are packed from the file, or from memory that is
used in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radix_runtime import ops
from radix_runtime.models.loaded_parameter import Staging
from radix_runtime.quantization.dense import DenseMethod, Int8Method, PlainMethod
from radix_runtime.quantization.params import ParamSpec
from tests.runtime.tiny_models import Driver, reference_model, save
from tests.runtime.waiting_weights import WaitingWeights


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference_model("llama_yarn"), tmp_path_factory.mktemp("llama"))


def test_sources_are_freed_when_packed(original: Path) -> None:
    driver = Driver(original)
    left = {name for name, _ in driver.model.named_parameters() if not name.endswith("bias")}
    assert {n for n in left if "norm" not in n} == {"model.embed_tokens.weight"}
    assert not any(p.is_meta for p in driver.model.parameters())


def test_a_source_is_freed_before_the_next_is_read(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more than two parameters, with all their parts, wait to be packed."""
    waiting = WaitingWeights(monkeypatch)
    Driver(original)
    layers = json.loads((original / "config.json").read_text())["num_hidden_layers"]
    assert waiting.packed >= 7 * layers
    assert waiting.most <= 6 < 7 * layers  # of qkv and gate_up at once, beside the embedding


def test_weights_are_packed_as_they_lie_in_the_file(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged ones too. And nothing of the file stays mapped."""
    read: list[torch.Size] = []
    in_place = ParamSpec.part_in_place

    def recorded(spec: ParamSpec, *args: Any) -> torch.Tensor:
        piece = in_place(spec, *args)
        read.append(piece.shape)
        return piece

    monkeypatch.setattr(ParamSpec, "part_in_place", recorded)
    driver = Driver(original)
    config = json.loads((original / "config.json").read_text())
    count = 7 * config["num_hidden_layers"]  # queries, keys, values, O, gate, up, down
    if not config["tie_word_embeddings"]:
        count += 1
    assert len(read) == count
    assert not any(param.is_meta for param in driver.model.parameters())
    maps = Path("/proc/self/maps").read_text()
    assert str(original) not in maps


def test_weights_of_another_type_are_converted_in_memory_that_is_used_in_turn(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are those of a checkpoint in that type."""
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    (narrow / "config.json").write_text((original / "config.json").read_text())
    weights = load_file(original / "model.safetensors")
    save_file(
        {name: weight.bfloat16() for name, weight in weights.items()}, narrow / "model.safetensors"
    )
    taken: list[torch.Size] = []
    take = Staging.take

    def recorded(staging: Staging, param: torch.Tensor) -> torch.Tensor:
        taken.append(param.shape)
        return take(staging, param)

    monkeypatch.setattr(Staging, "take", recorded)
    converted = Driver(original, dtype=torch.bfloat16).model
    assert len(taken) >= 4 * 3  # qkv, O, gate_up and down of three layers
    taken.clear()
    expected: dict[str, Any] = dict(Driver(narrow, dtype=torch.bfloat16).model.named_modules())
    assert not taken
    for name, module in converted.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, ops.PackedWeight):
            assert torch.equal(weight.data, expected[name].weight.data), name


@pytest.mark.parametrize("count", [1, 2])
def test_parts_become_one_where_a_method_says_nothing_of_them(count: int) -> None:
    class Repacking(DenseMethod):
        repacks = True

        def finalize(self, layer: Any) -> None:
            layer.hold(weight=layer.weight.data)

    layer: Any = torch.nn.Module()
    layer.stored = ("weight",)
    held: dict[str, torch.Tensor] = {}
    layer.hold = held.update
    parts = list(torch.randn(6, 4).split(6 // count))
    Repacking().finalize_parts(layer, parts)
    assert torch.equal(held["weight"], torch.cat(parts))
    is_first = held["weight"].data_ptr() == parts[0].data_ptr()
    assert is_first == (count == 1)


def test_memory_is_kept_only_for_parameters_that_will_come() -> None:
    staging = Staging()
    wide = torch.empty(8, 4, device="meta")
    for _ in range(3):
        staging.expect(wide)
    staging.expect(torch.empty(2, 4, device="meta"))
    first = staging.take(wide)
    second = staging.take(wide)  # both wait for their parts
    staging.give_back(first)
    staging.give_back(second)
    assert staging.take(wide) is second  # one is enough for the one that is missing
    staging.give_back(second)
    alone = staging.take(torch.empty(2, 4, device="meta"))
    staging.give_back(alone)
    assert not staging._free  # nothing else will come


def test_a_method_that_keeps_what_it_was_given_is_not_given_memory_that_is_used_again() -> None:
    class Keeping(DenseMethod):
        def keep(self, layer: Any, weight: torch.Tensor) -> None:
            layer.hold(weight=weight)

    class Finishing(DenseMethod):
        def finalize(self, layer: Any) -> None:
            layer.hold(weight=layer.weight.data)

    assert DenseMethod.repacks and Int8Method.repacks
    assert not (Keeping.repacks or Finishing.repacks or PlainMethod.repacks)
