"""The radix-runtime wheel, built from the files that git knows: all of them are in it, the licence,
nothing else."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from radix_runtime import ops

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "runtime/radix_runtime/"


def tracked(*places: str) -> list[str]:
    command = ["git", "ls-files", *places]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    if not names:
        pytest.skip("not a git checkout: which files belong is not known")
    return names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked("runtime", "LICENSE"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    before = set(copy.rglob("*"))
    options = ["--quiet", "--no-deps", "--wheel-dir", str(copy / "dist")]
    command = [sys.executable, "-m", "pip", "wheel", *options]
    if importlib.util.find_spec("hatchling"):
        command.append("--no-build-isolation")
    subprocess.run([*command, "./runtime"], cwd=copy, check=True, timeout=250)
    (built,) = (copy / "dist").iterdir()
    left = set(copy.rglob("*")) - before
    assert left == {copy / "dist", built}, "the build left something behind"
    return zipfile.ZipFile(built)


def test_holds_every_file_of_the_package(wheel):
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == {name.removeprefix("runtime/") for name in tracked(PACKAGE)}
    for name in ("radix_runtime/py.typed", "radix_runtime/demo_model/model.safetensors"):
        assert wheel.read(name) == (ROOT / "runtime" / name).read_bytes()


def test_holds_the_license(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_has_the_command(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert wheel.read(name).decode().split("\n")[:2] == [
        "[console_scripts]",
        "radix = radix_runtime.cli:main",
    ]


def test_extras_name_the_kernel_wheels_that_ops_accepts(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    needs = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    kernels = {need.name: need for need in needs if need.name.startswith("radix-kernels")}
    assert set(kernels) == {"radix-kernels-cpu", "radix-kernels-cuda", "radix-kernels-rocm"}
    low, minor = ops.WHEEL_FLOOR
    high, next_minor = ops.WHEEL_CEILING
    for need in kernels.values():
        assert set(map(str, need.specifier)) == {f">={low}.{minor}", f"<{high}.{next_minor}"}
        assert need.marker and need.marker.evaluate({"extra": need.name.rpartition("-")[2]})
