"""MXFP4 in GGUF files, against llama.cpp's Python package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from radix_runtime.errors import ConfigError
from radix_runtime.quantization.gguf_mxfp4 import dequantize_mxfp4, unpack_mxfp4
from tests.runtime.gguf_files import CASES, Quantize, as_codes, gguf_model, write_gguf
from tests.runtime.model_steps import ThreadCommunicator, run_ranks, worst_error
from tests.runtime.tiny_models import Driver

torch.set_num_threads(1)
TOLERANCE = 1e-5
MXFP4 = GGMLQuantizationType.MXFP4


def random_rows(rows: int, blocks: int, seed: int) -> np.ndarray:
    """Every bit pattern of floats, powers of two with which all of them are finite."""
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 256, (rows, blocks, 17), dtype=np.uint8)
    found[..., 0] = rng.integers(0, 253, (rows, blocks), dtype=np.uint8)
    return found.reshape(rows, -1)


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_values_are_those_of_the_package(rows: int) -> None:
    blocks = random_rows(rows, 8, seed=rows)
    expected = gguf.dequantize(blocks, MXFP4).astype(np.float32)
    assert np.array_equal(dequantize_mxfp4(blocks).numpy(), expected)
    found = unpack_mxfp4(blocks)
    assert found["kind"] == "int8" and found["group"] == 32 and found["mins"] is None
    values = found["w"].double().unflatten(1, (-1, 32)) * found["scales"].double()[..., None]
    assert np.array_equal(values.flatten(1).numpy(), expected.astype(np.float64))


@pytest.mark.parametrize("exponent", [253, 254, 255])
def test_powers_that_are_too_large(exponent: int) -> None:
    blocks = random_rows(2, 2, seed=0)
    blocks[1, 17] = exponent
    with pytest.raises(ValueError, match=f"has a scale of {exponent}"):
        unpack_mxfp4(blocks)


def experts_in(kind: str) -> Quantize:
    """As the published files of gpt-oss: experts in MXFP4, other matrices in another type."""
    experts = as_codes("MXFP4")
    others = as_codes(kind)
    return lambda name, values: (experts if "_exps." in name else others)(name, values)


def test_a_file_of_gpt_oss(tmp_path: Path) -> None:
    case = CASES["gpt_oss"]
    model = gguf_model(case)
    path = write_gguf(tmp_path / "model.gguf", case, model, experts_in("Q8_0"))
    driver = Driver(path)
    assert driver.config.dtype == "bfloat16" and driver.config.unknown_keys == ()
    assert worst_error(driver, model, seed=1) < TOLERANCE


def test_two_ranks(tmp_path: Path) -> None:
    case = CASES["gpt_oss"]
    model = gguf_model(case)
    path = write_gguf(tmp_path / "model.gguf", case, model, experts_in("Q5_0"))

    def work(comm: ThreadCommunicator) -> float:
        return worst_error(Driver(path, communicator=comm), model, seed=2)  # type: ignore[arg-type]

    assert 0 < run_ranks(2, work)[0] < TOLERANCE


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of the package, which reads it too
def test_a_power_that_is_too_large_names_file_and_tensor(tmp_path: Path) -> None:
    def quantize(name: str, values: np.ndarray) -> tuple[np.ndarray, str]:
        stored, kind = experts_in("Q8_0")(name, values)
        if name == "blk.1.ffn_down_exps.weight":
            stored[2, 5, 0] = 255
        return stored, kind

    case = CASES["gpt_oss"]
    path = write_gguf(tmp_path / "model.gguf", case, gguf_model(case), quantize)
    with pytest.raises(ConfigError) as caught:
        Driver(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: blk.1.ffn_down_exps.weight (")
    assert message.endswith("has a scale of 255, which is NaN")
