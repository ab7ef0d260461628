"""Attention's AMX kernels on a machine without AMX: their tile instructions emulated, all else as
it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from radix_kernels import _loader
from tests.child import run_at_level

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(_loader.backend != "cpu", reason="no native CPU library"),
    pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler"),
    pytest.mark.builds(),
]

BITS = """
import torch, radix_kernels as rk
rng = torch.Generator().manual_seed(1)
q, k, v = (torch.randn(300, 2, 64, generator=rng).bfloat16() for _ in range(3))
ends = torch.tensor([0, 300], dtype=torch.int32)
out = rk.flash_attn_varlen(q, k, v, ends, ends)
print(rk._loader.bind.isa(), hash(tuple(out.flatten().tolist())))
"""


def run(path: Path | str, *command: str) -> str:
    done = run_at_level("avx2", *command, path=str(path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return done.stdout


@pytest.mark.timeout(1200)
def test_attention(tmp_path):
    for name in ("CMakeLists.txt", "cmake", "kernel"):
        (tmp_path / name).symlink_to(ROOT / name)
    build = {
        "PYTHON": sys.executable,
        "JOBS": "2",
        "BACKEND": "cpu",
        "ONLY": "attention",
        "CXXFLAGS": "-DRADIX_EMULATE_TILES",
    }
    command = ["sh", str(ROOT / "tools/dev_build.sh")]
    subprocess.run(
        command,
        env={**os.environ, **build},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=900,
    )
    emulated = tmp_path / "build/cpu-attention/python"
    installed = str(Path(_loader.__file__).parents[1])
    assert run(emulated, "-c", BITS) != run(installed, "-c", BITS), (
        "the emulated library runs the kernels of AVX2"
    )
    run(
        emulated,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-o",
        "pythonpath=.",
        "tests/kernel/test_attention.py",
        "tests/kernel/test_attention_int8.py",
        "tests/kernel/test_attention_merge.py",
    )
