"""The loader is strict, reads only what a rank needs, and needs no weights for dummy models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radix_runtime import registry
from radix_runtime.config import ServerArgs
from radix_runtime.distributed import Communicator, CommunicatorAborted
from radix_runtime.errors import ConfigError
from radix_runtime.models import checkpoint_tensors, loader
from radix_runtime.models.decoder import DecoderForCausalLM
from tests.runtime.tiny_models import (
    TINY,
    Driver,
    Sequence,
    reference_logits,
    reference_model,
    relative_error,
    save,
)

torch.set_num_threads(1)
IDS = list(range(4, 30))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference_model("llama_yarn"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def logits(folder: Path, **options: Any) -> torch.Tensor:
    result = Driver(folder, **options).step([(Sequence(0, IDS), len(IDS))])
    assert result is not None
    return result


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(loader.LoadedParameter, "load", load)


def test_a_sharded_checkpoint_is_the_same(original: Path, tmp_path: Path) -> None:
    save(reference_model("llama_yarn"), tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(logits(tmp_path), logits(original))


def test_another_file_beside_the_checkpoint_is_not_read(folder: Path) -> None:
    expected = logits(folder)
    save_file({"x": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.norm.weight", r"no tensor for model\.norm\.weight$"),
        ("lm_head.weight", "no tensor for lm_head.weight"),
        (
            "model.layers.1.self_attn.k_proj.weight",
            r"no tensor for .*1\.self_attn\.k_proj\.weight$",
        ),
        ("model.layers.1.self_attn.v_proj.bias", r"no tensor for .*1\.self_attn\.v_proj\.bias$"),
        ("model.layers.2.mlp.up_proj.weight", r"no tensor for .*2\.mlp\.up_proj\.weight$"),
    ],
)
def test_a_missing_tensor(folder: Path, key: str, message: str) -> None:
    rewrite(folder, lambda tensors: tensors.pop(key))
    with pytest.raises(ConfigError, match=message):
        Driver(folder)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.3.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.qkv_proj.scale",
        "odd",
    ],
)
def test_an_extra_tensor(folder: Path, key: str) -> None:
    rewrite(folder, lambda tensors: tensors.update({key: torch.zeros(32)}))
    with pytest.raises(ConfigError, match=f"{key} has no place in this model"):
        Driver(folder)


def test_a_merged_name_and_its_parts_are_not_mixed_up(folder: Path) -> None:
    """The merged parameter's own name is no name of a checkpoint."""
    rewrite(
        folder,
        lambda t: t.update({"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(192, 128)}),
    )
    with pytest.raises(ConfigError, match="gate_up_proj"):
        Driver(folder)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("model.norm.weight", (127,)),
        ("model.embed_tokens.weight", (161, 128)),
        ("lm_head.weight", (160, 127)),
        ("model.layers.0.self_attn.q_proj.weight", (64, 128)),
        ("model.layers.0.self_attn.k_proj.bias", (65,)),
        ("model.layers.0.self_attn.o_proj.weight", (128, 64)),
        ("model.layers.0.mlp.down_proj.weight", (96, 128)),
    ],
)
def test_a_wrong_shape(
    folder: Path, key: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_weight_is_read(monkeypatch)
    rewrite(folder, lambda tensors: tensors.update({key: torch.zeros(shape)}))
    with pytest.raises(ConfigError, match=rf"{key} has shape \[.*\], expected \["):
        Driver(folder)


@pytest.mark.parametrize(
    ("key", "dtype", "message"),
    [
        ("model.layers.2.mlp.down_proj.weight", torch.int8, "holds int8, expected float32"),
        ("model.embed_tokens.weight", torch.int64, "holds int64, expected float32"),
        ("model.layers.1.self_attn.k_proj.bias", torch.bool, "holds bool, expected float32"),
    ],
)
def test_a_wrong_type(
    folder: Path, key: str, dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The headers tell it, before the tensors that lie before it in the file are read."""
    no_weight_is_read(monkeypatch)
    rewrite(folder, lambda tensors: tensors.update({key: tensors[key].to(dtype)}))
    with pytest.raises(ConfigError, match=f"{key} {message}"):
        Driver(folder)


def shard(folder: Path, **weight_map: str) -> None:
    """Splits the checkpoint in two files with an index; `weight_map` changes the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for number in (0, 1):
        part = {k: v for i, (k, v) in enumerate(sorted(tensors.items())) if i % 2 == number}
        save_file(part, folder / f"part-{number}.safetensors")
        index |= dict.fromkeys(part, f"part-{number}.safetensors")
    text = json.dumps({"metadata": {}, "weight_map": index | weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_a_tensor_that_is_there_twice(folder: Path) -> None:
    shard(folder)
    first = load_file(folder / "part-0.safetensors")
    key = sorted(first)[0]
    second = load_file(folder / "part-1.safetensors")
    save_file({**second, key: first[key]}, folder / "part-1.safetensors")
    with pytest.raises(ConfigError, match="disagree about " + key):
        Driver(folder)


def test_a_tensor_that_comes_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = checkpoint_tensors.Checkpoint.tensors

    def doubled(checkpoint: Any) -> Iterator[Any]:
        for item in tensors(checkpoint):
            yield item
            yield item

    monkeypatch.setattr(checkpoint_tensors.Checkpoint, "tensors", doubled)
    with pytest.raises(ConfigError, match="is there twice"):
        Driver(folder)


@pytest.mark.parametrize("file", ["part-1.safetensors", "part-2.safetensors", "../x", "/etc/x"])
def test_an_index_that_does_not_fit_the_files(folder: Path, file: str) -> None:
    shard(folder, **{"model.norm.weight": file})
    with pytest.raises(ConfigError, match=r"disagree about|cannot be read|outside of its"):
        Driver(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        Driver(folder)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_loading_ends_when_another_rank_has_failed(folder: Path, load_format: str) -> None:
    """Not with the last tensor, which may be minutes later."""
    looks = 0

    class Group(Communicator):
        def check(self) -> None:
            nonlocal looks
            looks += 1
            if looks == 5:
                raise CommunicatorAborted("communicator: aborted by rank 1")

    args = ServerArgs(model_path=str(folder), load_format=load_format)
    with pytest.raises(CommunicatorAborted):
        Driver(folder, communicator=Group(), args=args)
    assert looks == 5


def test_a_damaged_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be read"):
        Driver(folder)


def test_only_safetensors_are_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        Driver(folder)


def test_known_extras_are_passed_over(tmp_path: Path) -> None:
    reference = reference_model("llama_llama3")  # tied
    save(reference, tmp_path)
    extras = {
        "lm_head.weight": torch.full((160, 128), float("nan")),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16),
    }
    rewrite(tmp_path, lambda tensors: tensors.update(extras))
    assert relative_error(logits(tmp_path), reference_logits(reference, IDS)) < 1e-4


class Recorder:
    """A checkpoint tensor that counts the elements it gives away."""

    def __init__(self, source: Any, counts: dict[str, int], key: str) -> None:
        self._source = source
        self._counts = counts
        self._key = key

    def get_shape(self) -> list[int]:
        shape: list[int] = self._source.get_shape()
        return shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        piece: torch.Tensor = self._source[index]
        self._counts[self._key] = self._counts.get(self._key, 0) + piece.numel()
        return piece


class Rank(Communicator):
    """Loads as one of several ranks; does not talk."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size


def test_a_rank_reads_only_its_slices(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = checkpoint_tensors.Checkpoint.tensors
    counts: dict[str, int] = {}

    def recorded(checkpoint: Any) -> Iterator[Any]:
        for item in tensors(checkpoint):
            yield item._replace(source=Recorder(item.source, counts=counts, key=item.key))

    monkeypatch.setattr(checkpoint_tensors.Checkpoint, "tensors", recorded)
    Driver(original, communicator=Rank(1, 2))
    sizes = {k: v.numel() for k, v in load_file(original / "model.safetensors").items()}
    whole = ("norm.weight", "layernorm.weight", "o_proj.bias", "down_proj.bias")
    for key, size in sizes.items():
        assert counts[key] == (size if key.endswith(whole) else size // 2), key


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dummy_weights_need_only_a_config(name: str, ranks: int, tmp_path: Path) -> None:
    model = reference_model(name)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    args = ServerArgs(model_path=str(tmp_path), load_format="dummy", random_seed=3)
    driver = Driver(tmp_path, args=args, communicator=Rank(0, ranks))
    result = driver.step([(Sequence(0, IDS), len(IDS))])
    assert result is not None and result.isfinite().all() and result.std() > 0


def test_dummy_weights_follow_the_seed(original: Path) -> None:
    def run(seed: int) -> torch.Tensor:
        return logits(original, args=ServerArgs(load_format="dummy", random_seed=seed))

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_dummy_values(original: Path) -> None:
    driver = Driver(original, args=ServerArgs(load_format="dummy"))
    embedding = driver.model.get_parameter("model.embed_tokens.weight")
    assert 0.018 < float(embedding.std()) < 0.022
    assert bool((driver.model.get_parameter("model.norm.weight") == 1).all())


def test_a_model_of_another_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of `radix.models` is reached from config.json."""

    class Mine(DecoderForCausalLM):
        pass

    class Entry:
        name = "MineForCausalLM"

        def load(self) -> type[Mine]:
            return Mine

    def entry_points(group: str, name: str = Entry.name) -> list[Entry]:
        return [Entry()] if (group, name) == ("radix.models", Entry.name) else []

    expected = logits(folder)
    file = folder / "config.json"
    file.write_text(file.read_text().replace("LlamaForCausalLM", Entry.name))
    with pytest.raises(ConfigError, match="'MineForCausalLM'. is not supported"):
        Driver(folder)
    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(loader.models, "_items", {})
    driver = Driver(folder)
    assert type(driver.model) is Mine
    assert torch.equal(driver.step([(Sequence(0, IDS), len(IDS))]), expected)


def test_unknown_quantization(original: Path) -> None:
    args = ServerArgs(model_path=str(original), quantization="int3")
    with pytest.raises(ConfigError, match="quantization 'int3' is unknown; there are: dense"):
        Driver(original, args=args)


def test_a_weight_that_cannot_be_quantized_is_named(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan

    rewrite(folder, spoil)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight.* not finite"):
        Driver(folder, args=ServerArgs(model_path=str(folder), quantization="int8"))


def test_an_unknown_rope_setting_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["wobble"] = 2.0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="wobble"):
        Driver(folder)
