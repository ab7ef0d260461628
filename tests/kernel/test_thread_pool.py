"""The CPU library's thread pool by itself (thread_pool.cpp), compiled from its sources; under
ThreadSanitizer too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    ROOT / "tests/kernel/thread_pool.cpp",
    ROOT / "kernel/csrc/cpu/thread_pool.cpp",
    ROOT / "kernel/csrc/cpu/core_claims.cpp",
    ROOT / "kernel/csrc/cpu/cpu_quota.cpp",
    ROOT / "kernel/csrc/common/error.cpp",
]

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.serial,
    pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler"),
]


@pytest.mark.parametrize("sanitizer", ["", "-fsanitize=thread"])
def test_the_pool(tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "thread_pool"
    flags = [
        "-std=c++17",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-pthread",
        *([sanitizer] if sanitizer else []),
    ]
    includes = [f"-I{ROOT}/kernel/csrc", f"-I{ROOT}/kernel/include"]
    subprocess.run(
        ["c++", *flags, *includes, *map(str, SOURCES), "-o", str(program)], check=True, timeout=240
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
