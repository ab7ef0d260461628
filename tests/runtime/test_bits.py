"""Within one instruction-set level a row's bits depend on neither the batch around it nor the
number of threads: here the whole engine, by the log-probabilities of what it says."""

from __future__ import annotations

import json
import os

import pytest

from radix_kernels import _loader
from tests.child import run_at_level
from tests.kernel.isa_levels import LEVELS
from tests.marks import needs_cpu_library

FULL = bool(os.environ.get("RADIX_TEST_FULL"))
pytestmark = needs_cpu_library


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_has_the_same_bits_in_every_batch_and_with_any_threads(level: str) -> None:
    if level != _loader.bind.isa() and not FULL:
        pytest.skip("RADIX_TEST_FULL=1 runs the engine on lower levels, test_isa.py the ops")
    done = run_at_level(level, "-m", "tests.runtime.bits_child", timeout=280)
    if "this machine has" in done.stderr:
        pytest.skip(f"this machine has no {level}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("portable level" in done.stderr) == (level == "portable")  # what is so slow is said
    formats = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert [len(engines) for engines in formats] == [3, 2, 2]
    for alone, *others in formats:
        assert all(len(answer) == 6 for answer in alone)
        assert len({token for answer in alone for _, token in answer}) > 6
        assert all(other == alone for other in others)
    dense, *quantized = (engines[0] for engines in formats)
    assert dense not in quantized
