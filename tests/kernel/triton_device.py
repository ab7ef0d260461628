"""Where tests run Triton's kernels: on the GPU; without one on the executor of AMD's machine code
(`--triton gfx942`) or in Triton's interpreter, which conftest turns on."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest
import torch

from tests.kernel.helpers import ATTENTION

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter cuts float32 to bfloat16 where a chip rounds to the nearest.
TRITON_ATTENTION = {**ATTENTION, torch.bfloat16: (1e-2, 3e-2)} if INTERPRETED else ATTENTION


def need_triton() -> None:
    """Skips the module that calls it first where Triton is missing, or fails where REQUIRE names
    it."""
    if importlib.util.find_spec("triton") is None:
        if "triton" in os.environ.get("REQUIRE", ""):
            raise ImportError("REQUIRE names triton, but it is not installed")
        pytest.skip("triton is not installed", allow_module_level=True)


def triton_module(name: str) -> Any:
    """A module of `radix_kernels.triton`; as `need_triton` where Triton is missing."""
    need_triton()
    return importlib.import_module(f"radix_kernels.triton.{name}")
