"""What `make` does to .venv, with pip and the builder played by a script that writes down its
arguments."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def make(tmp_path):
    """make(target, VAR=value) -> the commands given to .venv's Python."""
    log = tmp_path / "log"
    python = tmp_path / "python"
    venv = tmp_path / "venv"
    python.write_text(f'#!/bin/sh\necho "$*" >>{log}\n')
    python.chmod(0o755)
    venv.mkdir()
    (venv / ".packages").touch()

    def run(target: str, **variables: str) -> list[str]:
        log.write_text("")
        settings = [
            f"{name}={value}" for name, value in {"VENV": venv, "RUN": python, **variables}.items()
        ]
        # Without the variables of a make that runs this test.
        env = {name: value for name, value in os.environ.items() if "MAKE" not in name}
        command = ["make", "-s", target, *settings]
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()

    run.venv = venv
    return run


def test_another_backend_takes_the_place_of_the_first(make):
    for backend, others in (("cpu", "cuda rocm"), ("cuda", "cpu rocm"), ("cpu", "cuda rocm")):
        commands = make("install", BACKEND=backend)
        removed = " ".join(f"radix-kernels-{name}" for name in others.split())
        assert commands[1] == f"-m pip uninstall -q -y {removed}"
        assert (
            commands[2].startswith("-m pip install") and f"radix_kernels_{backend}-" in commands[2]
        )
        assert [p.name for p in make.venv.glob(".installed-*")] == [f".installed-{backend}"]
        assert make("install", BACKEND=backend) == []


def test_triton_is_installed_when_asked_for_later(make):
    target = str(make.venv / ".test-packages")
    assert "triton" not in make(target, REQUIRE="")[0]
    assert make(target, REQUIRE="") == []
    assert "triton==" in make(f"{target}-triton", REQUIRE="cuda,triton")[0]


def test_a_wheel_is_of_the_families_and_targets_that_are_named(make):
    start = "tools/build_wheel.py cuda --jobs 2"
    assert [line.rstrip() for line in make("wheel", BACKEND="cuda")] == [start]
    (line,) = make("wheel", BACKEND="cuda", FAMILIES="gemm norm", ARCHS="90a-real")
    assert line == f"{start} --archs 90a-real --families gemm norm"


def test_the_kept_build_folder_is_told_every_setting(tmp_path):
    build_wheel = runpy.run_path(str(ROOT / "tools/build_wheel.py"))
    for families, wanted in (("gemm norm;moe", "gemm;norm;moe"), ("", "")):
        command = build_wheel["build_command"](tmp_path, tmp_path, [], "", families)
        assert (
            f"cmake.define.RADIX_ONLY={wanted}" in command
            and "cmake.define.RADIX_ARCHS=" in command
        )


@pytest.fixture
def cmake() -> str:
    program = Path(sys.executable).with_name("cmake")
    found = str(program) if program.exists() else shutil.which("cmake")
    if found is None:
        pytest.skip("cmake is not installed")
    return found


def test_a_family_that_is_not_there_is_named(tmp_path, cmake):
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path / "build"), "-DRADIX_ONLY=norm;gemms"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "cpu has no family 'gemms'" in " ".join(done.stderr.split())


def test_missing_python_headers_are_named(tmp_path, cmake):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{tmp_path};.cpython-399-x86_64-linux-gnu.so'\n")
    python.chmod(0o755)
    settings = (f"-DRADIX_PYTHONS={python}", f"-DPython_EXECUTABLE={sys.executable}")
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path / "build"), *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert f"{tmp_path}/Python.h is missing: install the headers of {python}" in " ".join(
        done.stderr.split()
    )
