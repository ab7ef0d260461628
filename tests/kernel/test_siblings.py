"""Two backends' wheels over one another are refused at import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import radix_kernels

PACKAGE = Path(radix_kernels.__file__).parent


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages with this package in it."""
    skipped = shutil.ignore_patterns("*.so", "lib", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "site" / "radix_kernels", ignore=skipped)
    return tmp_path / "site"


def imported(*folders: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, folders))
    return subprocess.run(
        [sys.executable, "-c", "from radix_kernels._loader import _installed; print(_installed())"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_one_distribution_is_found_by_its_folder(site: Path) -> None:
    (site / "radix_kernels_cuda-0.1.0.dist-info").mkdir()
    (site / "radix_kernels_cuda_extras-0.1.0.dist-info").mkdir()
    done = imported(site)
    assert done.stdout.strip() == "['radix-kernels-cuda']", done.stderr


def test_two_are_refused(site: Path) -> None:
    for backend in ("rocm", "cpu"):
        (site / f"radix_kernels_{backend}-0.1.0.dist-info").mkdir()
    done = imported(site)
    assert done.returncode != 0
    names = "radix-kernels-cpu and radix-kernels-rocm"
    assert f"ImportError: {names} are installed together and overwrite each other" in done.stderr
    assert "pip uninstall -y radix-kernels-cpu radix-kernels-rocm" in done.stderr


def test_one_elsewhere_overwrites_nothing(site: Path, tmp_path: Path) -> None:
    """As when a wheel is unpacked into a folder of its own that comes first on the path."""
    (site / "radix_kernels_rocm-0.1.0.dist-info").mkdir()
    (tmp_path / "other" / "radix_kernels_cpu-0.1.0.dist-info").mkdir(parents=True)
    done = imported(site, tmp_path / "other")
    assert done.stdout.strip() == "['radix-kernels-rocm']", done.stderr
