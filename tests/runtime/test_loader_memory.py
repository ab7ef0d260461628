"""What a load holds beside the weights: sources are packed from the file, or from memory that is
used in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from radix_runtime import ops
from radix_runtime.models.loaded_parameter import Staging
from radix_runtime.quantization.dense import DenseMethod, Int8Method, PlainMethod
from radix_runtime.quantization.params import ParamSpec
from tests.runtime.tiny_models import Driver, reference_model, save


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
    """Never more than one parameter, with all its parts, waits to be packed."""
    waiting: set[int] = set()
    peak = 0
    create, pack = torch.empty, ops.pack_weight

    def counted_empty(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal peak
        tensor = create(*args, **options)
        if tensor.dim() == 2 and not tensor.is_meta:
            waiting.add(tensor.data_ptr())
            peak = max(peak, len(waiting))
        return tensor

    def counted_pack(weight: torch.Tensor, **options: Any) -> Any:
        waiting.discard(weight.data_ptr())
        return pack(weight, **options)

    monkeypatch.setattr(ops, "pack_weight", counted_pack)
    monkeypatch.setattr(torch, "empty", counted_empty)
    Driver(original)
    assert 1 <= peak <= 3  # qkv and gate_up at once, beside the embedding


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
