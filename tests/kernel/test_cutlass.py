"""Where a build of the CUDA library finds CUTLASS, and what it says where there is none."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/fetch_cutlass.py"

pytestmark = pytest.mark.cpu_only

# cmake/RadixSm80.cmake in a project of one family that compiles nothing.
PROJECT = f"""
cmake_minimum_required(VERSION 3.24)
project(families LANGUAGES NONE)
set(RADIX_CSRC ${{CMAKE_CURRENT_SOURCE_DIR}})
include({ROOT}/cmake/RadixSm80.cmake)
"""
FAMILY = """
radix_find_cutlass()
message(STATUS "built with ${RADIX_CUTLASS}")
"""


def make_cutlass(folder: Path, major: int = 4) -> Path:
    """Of the headers the one that is looked at."""
    header = folder / "include/cutlass/version.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#define CUTLASS_MAJOR {major}\n")
    return folder


@pytest.fixture
def configure(tmp_path):
    """configure(settings, variables) -> (whether CMake succeeds, what it says)."""
    program = Path(sys.executable).with_name("cmake")
    cmake = str(program) if program.exists() else shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    source = tmp_path / "source"
    (source / "sm80/toy").mkdir(parents=True)
    (source / "CMakeLists.txt").write_text(PROJECT)
    (source / "sm80/toy/sources.cmake").write_text(FAMILY)
    # A git that reaches nothing.
    git = tmp_path / "bin/git"
    git.parent.mkdir()
    git.write_text("#!/bin/sh\nexit 128\n")
    git.chmod(0o755)

    def run(*settings: str, **variables: str) -> tuple[bool, str]:
        path = f"{git.parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "PYTHONPATH": "", "RADIX_CUTLASS_DIR": "", **variables}
        command = [cmake, "-S", str(source), "-B", str(tmp_path / "build"), *settings]
        command.append(f"-DPython_EXECUTABLE={sys.executable}")
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        return done.returncode == 0, " ".join((done.stdout + done.stderr).split())

    return run


@pytest.mark.parametrize("is_variable", [False, True])
def test_a_folder_that_is_given(configure, tmp_path, is_variable):
    folder = make_cutlass(tmp_path / "own")
    settings = [] if is_variable else [f"-DRADIX_CUTLASS_DIR={folder}"]
    variables = {"RADIX_CUTLASS_DIR": str(folder)} if is_variable else {}
    good, said = configure(*settings, **variables)
    assert good and f"built with {folder}" in said


def test_the_package(configure, tmp_path):
    package = tmp_path / "site/cutlass_library"
    make_cutlass(package / "source")
    (package / "__init__.py").touch()
    good, said = configure(PYTHONPATH=str(package.parent))
    assert good and f"built with {package}/source" in said


def test_there_is_none(configure, tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", "import cutlass_library"],
        env={"PYTHONPATH": ""},
        capture_output=True,
    )
    if found.returncode == 0:
        pytest.skip("nvidia-cutlass is installed")
    good, said = configure()
    assert not good
    assert said.count("CMake Error") == 1
    for way in ("RADIX_CUTLASS_DIR a folder", "nvidia-cutlass==4.2.0.0", "RADIX_CUTLASS_DIR=none"):
        assert way in said
    good, said = configure("-DRADIX_CUTLASS_DIR=none")
    assert good and "without CUTLASS, and so without toy" in said and "built with" not in said


def test_what_is_no_cutlass(configure, tmp_path):
    good, said = configure(f"-DRADIX_CUTLASS_DIR={tmp_path}")
    assert not good and f"{tmp_path} is no CUTLASS: include/cutlass/version.h is missing" in said
    good, said = configure(f"-DRADIX_CUTLASS_DIR={make_cutlass(tmp_path / 'old', 3)}")
    assert not good and f"{tmp_path}/old is not CUTLASS 4" in said


def test_families_without_it_do_not_look(configure):
    good, said = configure("-DRADIX_ONLY=norm;gemm")
    assert good and "built with" not in said and "CUTLASS" not in said


def test_both_name_one_version():
    tag, package = "v4.2.0", "nvidia-cutlass==4.2.0.0"
    cmake = (ROOT / "cmake/RadixSm80.cmake").read_text()
    assert f"_cutlass_tag {tag})" in cmake and package in cmake
    assert package in TOOL.read_text()


@pytest.fixture
def fetch(tmp_path):
    """fetch(families, variables) -> (what the tool prints, what it says), in a tree without build/;
    pip reaches nothing."""
    tool = tmp_path / "tools/fetch_cutlass.py"
    tool.parent.mkdir()
    shutil.copy(TOOL, tool)
    manifest = tmp_path / "kernel/csrc/sm80/scaled_mm/sources.cmake"
    manifest.parent.mkdir(parents=True)
    manifest.touch()

    def run(families: str, **variables: str) -> tuple[str, str]:
        env = {**os.environ, "RADIX_CUTLASS_DIR": "", "PIP_NO_INDEX": "1", **variables}
        command = [sys.executable, str(tool), families]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr

    return run


def test_the_tool(fetch, tmp_path):
    for families in ("gemm", "gemm norm", "norm;gemm"):
        assert fetch(families) == ("", "")
    for families in ("", "scaled_mm", "norm;scaled_mm"):
        found, said = fetch(families)
        assert found == "" and "nvidia-cutlass==4.2.0.0 cannot be installed" in said
        assert fetch(families, RADIX_CUTLASS_DIR="none") == ("none", "")
    source = make_cutlass(tmp_path / "build/cutlass/cutlass_library/source")
    assert fetch("") == (str(source), "")
    assert fetch("", RADIX_CUTLASS_DIR="/own") == ("/own", "")


def make_wheel(folder: Path, *headers: str) -> str:
    """A package of the tool's name with these files; the folder, for pip to look into."""
    folder.mkdir()
    about = "nvidia_cutlass-4.2.0.0.dist-info"
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    named = "Metadata-Version: 2.1\nName: nvidia-cutlass\nVersion: 4.2.0.0\n"
    files = {f"cutlass_library/source/include/cutlass/{name}": "whole\n" for name in headers}
    files |= {f"{about}/WHEEL": kind, f"{about}/METADATA": named}
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(folder / "nvidia_cutlass-4.2.0.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return str(folder)


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")
def test_the_tool_installs_all_or_nothing(fetch, tmp_path):
    """What an installation that was broken off has left behind is not taken for CUTLASS."""
    build = tmp_path / "build"
    source = build / "cutlass/cutlass_library/source"
    left = source / "include/cutlass/half.h"
    left.parent.mkdir(parents=True)
    left.touch()
    found, said = fetch("scaled_mm")
    assert found == "" and "nvidia-cutlass==4.2.0.0 cannot be installed" in said
    assert list(build.iterdir()) == [build / "cutlass"]
    without = make_wheel(tmp_path / "without", "cutlass.h")
    found, said = fetch("scaled_mm", PIP_FIND_LINKS=without)
    assert found == "" and "has no headers" in said and left.exists()
    whole = make_wheel(tmp_path / "whole", "cutlass.h", "version.h")
    assert fetch("scaled_mm", PIP_FIND_LINKS=whole) == (str(source), "")
    assert {path.name for path in left.parent.iterdir()} == {"cutlass.h", "version.h"}
    assert list(build.iterdir()) == [build / "cutlass"]
    assert fetch("scaled_mm") == (str(source), "")
