"""MXFP4 in GGUF files, against llama.cpp's Python package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from radix_runtime.errors import ConfigError
from tests.runtime.gguf_files import CASES, Quantize, as_codes, gguf_model, write_gguf
from tests.runtime.model_steps import ThreadCommunicator, run_ranks, worst_error
from tests.runtime.tiny_models import Driver

torch.set_num_threads(1)
TOLERANCE = 1e-5


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
