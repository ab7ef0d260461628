"""Two backends' wheels over one another are refused at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.child import IMPORT_PATH


def imported(*folders: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([IMPORT_PATH, *map(str, folders)])
    return subprocess.run(
        [sys.executable, "-c", "from radix_kernels._loader import _installed; print(_installed())"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def alone():
    if imported().stdout.strip() != "[]":
        pytest.skip("a wheel of radix-kernels is installed here")


def test_one_distribution_is_found_by_its_folder(alone, tmp_path):
    (tmp_path / "radix_kernels_cuda-0.1.0.dist-info").mkdir()
    (tmp_path / "radix_kernels_cuda_extras-0.1.0.dist-info").mkdir()
    done = imported(tmp_path, tmp_path / "no folder")
    assert done.stdout.strip() == "['radix-kernels-cuda']", done.stderr


def test_two_are_refused(alone, tmp_path):
    for number, backend in enumerate(("rocm", "cpu")):
        (tmp_path / str(number) / f"radix_kernels_{backend}-0.1.0.dist-info").mkdir(parents=True)
    done = imported(tmp_path / "0", tmp_path / "1")
    assert done.returncode != 0
    names = "radix-kernels-cpu and radix-kernels-rocm"
    assert f"ImportError: {names} are installed together and overwrite each other" in done.stderr
    assert "pip uninstall -y radix-kernels-cpu radix-kernels-rocm" in done.stderr
