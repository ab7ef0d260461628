"""Every op of the CPU library under Valgrind (memcheck.cpp), at the level AVX2, for Valgrind knows
no more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from radix_kernels import _loader
from tests.marks import needs_cpu_library

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(_loader.__file__).with_name("lib") / "libradix_kernels.so"
SOURCE = Path(__file__).with_name("memcheck.cpp")
FOUND = 99  # exit status
# Entries that touch no tensor.
PLAIN = {"abi_version", "backend", "version", "get_num_threads", "set_num_threads", "comm_abort"}
PLAIN |= {"flash_attn_workspace_size", "sampling_workspace_size"}

pytestmark = [
    pytest.mark.cpu_only,
    needs_cpu_library,
    pytest.mark.timeout(600),  # 20 s where nothing else runs
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Over the library under test. Skips without Valgrind, unless REQUIRE names it."""
    if missing := [name for name in ("valgrind", "c++") if shutil.which(name) is None]:
        text = f"{' and '.join(missing)} not installed"
        if "valgrind" in os.environ.get("REQUIRE", "").split(","):
            pytest.fail(text)
        pytest.skip(text)
    path = tmp_path_factory.mktemp("memcheck") / "memcheck"
    flags = [
        "-std=c++17",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Wno-missing-field-initializers",
        "-pthread",
    ]
    command = [
        "c++",
        *flags,
        f"-I{ROOT}/kernel/include",
        SOURCE,
        LIBRARY,
        f"-Wl,-rpath,{LIBRARY.parent}",
        "-o",
        path,
    ]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return path


def memcheck(*command: str | Path) -> subprocess.CompletedProcess[str]:
    valgrind = ["valgrind", "-q", f"--error-exitcode={FOUND}", *map(str, command)]
    env = {**os.environ, "RADIX_CPU_ISA": "avx2"}
    done = subprocess.run(valgrind, env=env, capture_output=True, text=True, timeout=590)
    if "this machine has portable at most" in done.stderr:
        pytest.skip("this machine has no AVX2")
    return done


@pytest.mark.builds()
def test_ops_stay_within_their_tensors_and_write_all_of_their_outputs(program):
    done = memcheck(program)
    assert done.returncode == 0 and not done.stderr, done.stderr[-4000:]
    assert "ran at level avx2" in done.stdout


@pytest.mark.builds()
@pytest.mark.parametrize(
    ("mistake", "report"),
    [("past-the-end", "Invalid read of size"), ("not-written", "uninitialised value")],
)
def test_mistakes_are_found(mistake, report, program):
    done = memcheck(program, mistake)
    assert done.returncode == FOUND and report in done.stderr, done.stderr


def test_every_op_is_called():
    if shutil.which("nm") is None:
        pytest.skip("nm not installed")
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", str(LIBRARY)], capture_output=True, text=True, check=True
    )
    ops = set(re.findall(r" T rk_(\w+)", symbols.stdout)) - PLAIN
    assert len(ops) > 30 and ops <= set(re.findall(r"rk_(\w+)\(", SOURCE.read_text()))
