"""The checks of a machine with a GPU fail, rather than pass over nothing, where no native kernel is
there."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kernels import __main__ as bench
from radix_kernels import _loader
from tests.child import IMPORT_PATH

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(
        _loader.backend != "cpu", reason="says what happens without a GPU's library"
    ),
]


def child(
    *command: str | Path, path: str = IMPORT_PATH, **env: str
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": path, **env}
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=env, capture_output=True, text=True, timeout=250
    )


def run_pytest(*options: str, path: str = IMPORT_PATH) -> subprocess.CompletedProcess[str]:
    """One test; `pythonpath=.`: the package under test is that of `path`."""
    flags = ("-q", "-p", "no:cacheprovider", "-o", "pythonpath=.", "-k", "overflow")
    return child(
        sys.executable, "-m", "pytest", *flags, *options, "tests/kernel/test_norm.py", path=path
    )


@pytest.fixture
def without_library(tmp_path) -> str:
    """An import path on which radix_kernels is the Python alone, as in a fresh checkout."""
    package = tmp_path / "kernel/python/radix_kernels"
    package.mkdir(parents=True)
    (tmp_path / "kernel/VERSION").write_text(_loader.version)
    for file in Path(_loader.__file__).parent.iterdir():
        if file.suffix != ".so" and file.name not in ("lib", "_build.json", "__pycache__"):
            (package / file.name).symlink_to(file)
    # _loader resolves links, so it must be a file of this folder to look here.
    (package / "_loader.py").unlink()
    (package / "_loader.py").write_text(Path(_loader.__file__).read_text())
    return os.pathsep.join([str(package.parent), IMPORT_PATH])


def test_a_device_without_a_library_is_an_error():
    done = run_pytest("--device", "cuda")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no native kernel runs on cuda here" in done.stderr
    assert "the installed library is of the cpu backend" in done.stderr


def test_the_cpu_without_a_library_is_an_error_unless_asked_for(without_library):
    done = run_pytest(path=without_library)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert (
        "no native kernel runs on cpu here" in done.stderr
        and "no native library for" in done.stderr
    )
    done = run_pytest("--reference", path=without_library)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "check", ["sanitize", "sampling_equality compare none --device cuda", "no_sync"]
)
def test_programs_say_that_nothing_was_checked(check, monkeypatch):
    """In this process, which has loaded torch."""
    name, *args = check.split()
    monkeypatch.setattr(sys, "argv", [name, *args])
    with pytest.raises(SystemExit, match="the installed library is of the cpu backend"):
        runpy.run_module(f"tests.gpu.{name}", run_name="__main__")


@pytest.mark.parametrize(
    "status, log, found",
    [
        (99, "RACECHECK SUMMARY: 9 hazards displayed (9 errors, 0 warnings)", True),
        (99, "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", False),
        (1, "RACECHECK SUMMARY: 9 hazards displayed (9 errors, 0 warnings)", False),
        (1, "ModuleNotFoundError: No module named 'radix_kernels'", False),
        (0, "decode: error 1e-3", False),
    ],
)
def test_a_planted_barrier_is_found_by_its_hazard(tmp_path, status, log, found):
    """compute-sanitizer is played by a script that fails over the planted build alone."""
    for name in ("good", "planted", "bin"):
        (tmp_path / name).mkdir()
    tool = tmp_path / "bin/compute-sanitizer"
    tool.write_text(
        f'#!/bin/sh\ncase $PYTHONPATH in */planted:*) echo "{log}"; exit {status};; esac\n'
    )
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    folders = (tmp_path / "good", tmp_path / "out", tmp_path / "planted")
    done = child("tools/sanitize.sh", *folders, PATH=path, FAMILIES="decode", TOOLS="racecheck")
    assert done.returncode == (0 if found else 1), done.stdout + done.stderr
    assert ("barrier was found" in done.stdout) == found


def test_a_bench_without_a_case_fails(monkeypatch):
    limits = bench.Limits(device="", read_gbs=1, copy_gbs=1, tflops={})
    monkeypatch.setattr(bench, "measure_limits", lambda device: limits)
    monkeypatch.setattr(sys, "argv", ["bench", "pointwise", "--shapes", "nosuchshape"])
    with pytest.raises(SystemExit, match="no case: no shape contains nosuchshape"):
        bench.main()
