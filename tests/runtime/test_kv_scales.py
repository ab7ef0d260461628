"""Scales of an FP8 cache that a checkpoint was calibrated with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radix_kernels import reference
from radix_runtime import ops
from radix_runtime.attention.torch_native import TorchNativeAttention
from radix_runtime.errors import ConfigError
from radix_runtime.layers.attention import Attention
from tests.runtime.family_models import Checkpoints
from tests.runtime.tiny_models import (
    Driver,
    Sequence,
    random_ids,
    reference_logits,
    relative_error,
)

# The formats of FP8, OCP's and an MI300's, with what a checkpoint's scale is multiplied with there.
FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e4m3fnuz: 2}
BOUND = 0.12  # of logits, with keys and values that are rounded to 3 bits of mantissa

# Where writers put the scales of a layer.
PLACES = {
    "beside the attention": "self_attn.{}_scale",
    "beside the product": "self_attn.{0}_proj.{0}_scale",
    "as outputs of the product": "self_attn.{}_proj.output_scale",
    "in a module of its own": "self_attn.attn.{}_scale",
}


def calibrated(
    folder: Path, made: Path, scale: Callable[[int, str], torch.Tensor], place: str
) -> Path:
    """A copy of a checkpoint with a scale for the keys and one for the values of each layer."""
    shutil.copytree(folder, made, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    layers = {int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
    for layer in layers:
        for part in ("k", "v"):
            name = f"model.layers.{layer}.{PLACES[place].format(part)}"
            tensors[name] = scale(layer, part)
    save_file(tensors, made / "model.safetensors")
    return made


def of_layer(layer: int, part: str) -> torch.Tensor:
    """Powers of two have no error of their own, these do."""
    return torch.tensor(0.011 * (layer + 1) * (2 if part == "v" else 1))


@pytest.fixture(autouse=True)
def stored_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of a CPU stores FP8, or reads it."""
    monkeypatch.setattr(ops, "fused_qk_norm_rope_store", reference.fused_qk_norm_rope_store)
    monkeypatch.setattr(TorchNativeAttention, "supports", lambda *_: True)


def fp8_driver(folder: Path, kv_dtype: torch.dtype) -> Driver:
    driver = Driver(folder, kv_dtype=kv_dtype, backend="torch_native")
    for module in driver.model.modules():
        if isinstance(module, Attention):
            module.calibrate(driver.pool)
    return driver


@pytest.mark.parametrize("kv_dtype", FORMATS, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_every_layer_has_its_scales(
    checkpoint: Checkpoints, tmp_path: Path, place: str, kv_dtype: torch.dtype
) -> None:
    folder, _ = checkpoint("qwen3")
    pool = fp8_driver(calibrated(folder, tmp_path, of_layer, place), kv_dtype).pool
    unit = FORMATS[kv_dtype]
    for layer in pool.k:
        assert torch.equal(pool.k_scale[layer], unit * of_layer(layer, "k").reshape(1))
        assert torch.equal(pool.v_scale[layer], unit * of_layer(layer, "v").reshape(1))


@pytest.mark.parametrize("kv_dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_what_is_stored_is_divided_by_them(
    checkpoint: Checkpoints, tmp_path: Path, name: str, kv_dtype: torch.dtype
) -> None:
    """Scales for values far beyond the range of FP8 and of ones: with those of the checkpoint the
    logits are near, without they are not."""
    folder, model = checkpoint(name)
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        if "v_proj" in key:
            tensor.mul_(4000)
        if "o_proj.weight" in key:
            tensor.div_(4000)
    grown = tmp_path / "grown"
    shutil.copytree(folder, grown)
    save_file(tensors, grown / "model.safetensors")

    def scale(layer: int, part: str) -> torch.Tensor:
        return torch.tensor([40.0 if part == "v" else 0.05])

    made = calibrated(grown, tmp_path / "made", scale, "beside the attention")
    driver = fp8_driver(made, kv_dtype)
    ids = random_ids(driver.config, 40, seed=1)
    expected = reference_logits(model, ids)
    error = relative_error(driver.step([(Sequence(0, ids), 40)]), expected)
    assert 1e-4 < error < BOUND
    stored = driver.pool.v[0].float()[driver.pool.v[0].float().isfinite()]
    assert 1 < float(stored.abs().max()) <= torch.finfo(kv_dtype).max
    without = fp8_driver(grown, kv_dtype)
    worse = relative_error(without.step([(Sequence(0, ids), 40)]), expected)
    print(f"{name}: {error:.3f} with scales, {worse:.3f} without")
    assert worse > 4 * BOUND


def test_other_caches_do_not_use_them(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoint("qwen3")
    made = calibrated(folder, tmp_path, of_layer, "beside the attention")
    ids = random_ids(Driver(folder).config, 20, seed=2)
    found = []
    for path in (folder, made):
        driver = Driver(path)
        for module in driver.model.modules():
            if isinstance(module, Attention):
                module.calibrate(driver.pool)
        assert not driver.pool.k_scale
        found.append(driver.step([(Sequence(0, ids), 20)]))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor([0.0]), "is 0.0, expected a positive number"),
        (torch.tensor([-1.0]), "is -1.0, expected a positive number"),
        (torch.tensor([float("nan")]), "is nan, expected a positive number"),
        (torch.tensor([float("inf")]), "is inf, expected a positive number"),
        (torch.ones(2), r"has shape \[2\], expected one scale"),
    ],
    ids=str,
)
def test_a_scale_that_cannot_be(
    checkpoint: Checkpoints, tmp_path: Path, scale: torch.Tensor, message: str
) -> None:
    folder, _ = checkpoint("qwen3")
    made = calibrated(folder, tmp_path, lambda *_: scale.clone(), "beside the attention")
    with pytest.raises(ConfigError, match=message) as caught:
        Driver(made)
    assert "self_attn." in str(caught.value) and "model.safetensors" in str(caught.value)


def test_latent_values_have_scales_of_their_own(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder, model = checkpoint("deepseek_v3")
    made = calibrated(folder, tmp_path, of_layer, "beside the attention")
    driver: Any = Driver(made)
    ids = random_ids(driver.config, 12, seed=3)
    expected = reference_logits(model, ids)
    assert relative_error(driver.step([(Sequence(0, ids), 12)]), expected) < 1e-4
