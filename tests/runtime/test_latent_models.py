"""Models with latent attention, beside what test_families.py asks of all."""

from __future__ import annotations

import pytest

from tests.runtime.family_models import Checkpoints
from tests.runtime.model_steps import worst_error
from tests.runtime.test_families import TOLERANCE
from tests.runtime.tiny_models import Driver


@pytest.mark.parametrize("backend", ["paged", "torch_native"])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"])
def test_large_pages(checkpoint: Checkpoints, name: str, backend: str) -> None:
    folder, reference = checkpoint(name)
    driver = Driver(folder, page_size=64, backend=backend)
    assert worst_error(driver, reference, seed=7) < TOLERANCE
