"""The op tests again on every lower instruction-set level that this machine can run: each test
with every value of its parameters, and with all sets of them under RADIX_TEST_FULL=1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from radix_kernels import _loader
from tests.child import run_at_level
from tests.kernel.isa_levels import FAMILIES, FILES, LEVELS
from tests.marks import needs_cpu_library

ROOT = Path(__file__).resolve().parents[2]

pytestmark = needs_cpu_library


def has(level: str) -> bool:
    code = "from radix_kernels import _loader; print(_loader.bind.isa())"
    return run_at_level(level, "-c", code).stdout.strip() == level


@pytest.mark.timeout(600)  # thousands of tests, on CPUs that others share
@pytest.mark.parametrize("level", LEVELS)
def test_ops(level):
    if level == _loader.bind.isa():
        pytest.skip("this level is the one the other test files ran on")
    if not has(level):
        pytest.skip(f"this machine has no {level}")
    cover = [] if os.environ.get("RADIX_TEST_FULL") else ["--cover", level]
    # Its outcome does not depend on the level.
    other = [
        "--deselect",
        "tests/kernel/test_comm.py::test_two_processes_over_an_anonymous_file",
    ]
    # `pythonpath=.`: the package under test is this process's, not the source tree, which may have
    # no library.
    done = run_at_level(
        level,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-o",
        "pythonpath=.",
        *FILES,
        *other,
        *cover,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_every_family_with_kernels_is_among_the_files():
    manifests = (ROOT / "kernel/csrc/cpu").glob("*/sources.cmake")
    families = {path.parent.name for path in manifests if "KERNELS" in path.read_text()}
    assert len(families) > 8 and families <= set(FAMILIES)


def test_unknown_level_is_refused():
    done = run_at_level("sse9", "-c", "from radix_kernels import _loader; _loader.bind.isa()")
    assert "ValueError: RADIX_CPU_ISA=sse9: expected portable, avx2" in done.stderr


def test_level_above_the_machine_is_refused():
    if has("amx"):
        pytest.skip("this machine has every level")
    done = run_at_level("amx", "-c", "from radix_kernels import _loader; _loader.bind.isa()")
    assert "NotImplementedError: RADIX_CPU_ISA=amx: this machine has" in done.stderr
