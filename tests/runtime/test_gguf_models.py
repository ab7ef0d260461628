"""GGUF files against transformers: files written by llama.cpp's package, the model that it reads
back from them in float32."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from radix_kernels import reference
from radix_runtime import ops
from tests.runtime.gguf_files import CASES, as_codes, as_floats, gguf_model, write_gguf
from tests.runtime.model_steps import ThreadCommunicator, run_ranks, worst_error
from tests.runtime.tiny_models import (
    Driver,
    Sequence,
    cpu_target,
    random_ids,
    reference_logits,
    relative_error,
)

torch.set_num_threads(1)
TOLERANCE = 1e-5
FULL = os.environ.get("RADIX_TEST_FULL") == "1"
TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


@pytest.mark.parametrize("name", CASES)
def test_architectures(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = gguf_model(case)
    path = write_gguf(tmp_path / "model.gguf", case, model, as_floats())
    driver = Driver(path)
    assert driver.config.unknown_keys == () and driver.config.dtype == "float32"
    assert worst_error(driver, model, seed=1) < TOLERANCE


# Each type alone, and all of them mixed in one file; of each architecture in `make test-full`.
FILES = [
    (name, kinds)
    for name in ("llama", "qwen3moe", "gemma3")
    for kinds in (*((kind,) for kind in TYPES), TYPES)
    if FULL or name == "llama" or kinds == TYPES
]


@pytest.mark.parametrize(
    ("name", "kinds"), FILES, ids=[f"{name}-{'+'.join(kinds)}" for name, kinds in FILES]
)
def test_types(name: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    case = CASES[name]
    model = gguf_model(case)
    path = write_gguf(tmp_path / "model.gguf", case, model, as_codes(*kinds))
    driver = Driver(path)
    assert driver.config.dtype == "bfloat16"
    assert worst_error(driver, model, seed=2) < TOLERANCE


SUPER_FILES = [
    ("llama", ("Q4_K",)),
    ("llama", ("Q5_K",)),
    ("llama", ("Q6_K",)),
    ("llama", ("Q4_K", "Q6_K")),  # as files called Q4_K_M are
    ("llama", ("Q5_K", "Q4_K", "Q6_K", "Q4_K")),
    ("qwen3moe", ("Q4_K", "Q6_K")),
    ("qwen3moe", ("MXFP4",)),
]


@pytest.mark.parametrize(
    ("name", "kinds"), SUPER_FILES, ids=[f"{name}-{'+'.join(kinds)}" for name, kinds in SUPER_FILES]
)
def test_forms_that_round_x(
    name: str, kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K types and 4-bit floats as they are held where the compute type has 16 bits, but computed in
    float32: what differs from transformers is x, which is rounded there in the same way."""
    case = CASES[name]
    model = gguf_model(case)
    path = write_gguf(tmp_path / "model.gguf", case, model, as_codes(*kinds))
    driver = Driver(path, target=cpu_target(torch.bfloat16))
    held = {weight.kind for weight in packed_weights(driver.model)}
    assert {kind.lower() for kind in kinds} & held
    group = 32 if kinds == ("MXFP4",) else 256
    linear = torch.nn.functional.linear

    def of_rounded(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if weight.shape[0] > 6:  # what chooses experts is not quantized
            codes, scales = reference.quantize_rows(x.flatten(0, -2), group)
            rounded = reference.dequantize_weight(codes, scales, None, group)
            x = rounded.float().view(x.shape)
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", of_rounded)
    # A number between two codes may go either way.
    ids = random_ids(driver.config, 40, 4)
    logits = driver.step([(Sequence(4, ids), 40)])
    assert logits is not None
    wanted = reference_logits(model, ids)
    errors = [relative_error(*rows) for rows in zip(logits, wanted, strict=True)]
    # A number of x between two codes may go either way, which the tokens behind it see.
    assert min(errors) < TOLERANCE and max(errors) < 5e-2


def packed_weights(model: torch.nn.Module) -> list[ops.PackedWeight]:
    found = [getattr(module, "weight", None) for module in model.modules()]
    return [weight for weight in found if isinstance(weight, ops.PackedWeight)]


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_float_types(kind: str, tmp_path: Path) -> None:
    case = CASES["qwen2"]
    model = gguf_model(case)
    driver = Driver(write_gguf(tmp_path / "model.gguf", case, model, as_floats(kind)))
    assert driver.config.dtype == {"F16": "float16", "BF16": "bfloat16"}[kind]
    assert worst_error(driver, model, seed=3) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen2moe", "gemma2"])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = gguf_model(case)
    path = write_gguf(tmp_path / "model.gguf", case, model, as_codes("Q4_K", "Q6_K", "Q5_0"))

    def work(comm: ThreadCommunicator) -> float:
        return worst_error(Driver(path, communicator=comm), model, seed=4)  # type: ignore[arg-type]

    assert 0 < run_ranks(2, work)[0] < TOLERANCE
