"""`radix doctor`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from radix_kernels import _loader
from radix_runtime import ops
from radix_runtime.cli import doctor, main
from radix_runtime.cli.doctor_facts import Problem
from radix_runtime.device import Device
from radix_runtime.errors import ConfigError
from tests.runtime.command import Run


def test_doctor(here: Run) -> None:
    result = here("doctor", "--ops")
    assert "torch" in result.stdout and "rmsnorm" in result.stdout
    assert "cpu cores" in result.stdout and "Traceback" not in result.stderr


def test_columns_stand_below_one_another(here: Run) -> None:
    lines = here("doctor", "--ops").stdout.splitlines()
    ops_lines = [line for line in lines if line.startswith("  ")]
    assert any(line.startswith("  top_k_top_p_sampling_with_logprobs ") for line in ops_lines)
    gaps = [re.match(r"  \S+ +", line) for line in ops_lines]
    assert len({gap.end() for gap in gaps if gap is not None}) == 1


def test_doctor_says_it_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[Problem]:
        yield Problem("a [/b] c", "pip install x[y]")
        raise ImportError("no [bold] symbol", name="radix_kernels")

    for section in ("_kernels", "_machine", "_gpu"):
        monkeypatch.setattr(doctor, section, broken)
    assert main(["doctor"]) == 78
    said = capsys.readouterr().out.splitlines()[-4:]
    first = ["problem: a [/b] c", "    remedy: pip install x[y]"]
    assert said == [
        *first,
        "problem: radix_kernels does not load: no [bold] symbol",
        "    remedy: reinstall the kernel wheel",
    ]


def test_doctor_tells_wheels_that_are_installed_over_one_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for backend in ("cpu", "cuda"):
        folder = tmp_path / f"radix_kernels_{backend}-0.1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: radix-kernels-{backend}\nVersion: 0.1.0\n")
    monkeypatch.setattr(_loader, "_FOLDER", tmp_path / "radix_kernels")

    def refused() -> Iterator[Problem]:
        # ops.py passes on what the kernel package says.
        try:
            _loader._refuse_siblings()
        except ImportError as error:
            raise ConfigError(str(error)) from None
        yield Problem("not", "refused")

    for section in ("_machine", "_gpu"):
        monkeypatch.setattr(doctor, section, lambda: iter(()))
    monkeypatch.setattr(doctor, "_kernels", refused)
    assert main(["doctor"]) == 78
    what, remedy = capsys.readouterr().out.splitlines()[-2:]
    assert what.startswith("problem: radix-kernels-cpu and ")
    assert what.endswith("overwrite each other")
    assert remedy.startswith("    remedy: Keep one: pip uninstall -y radix-kernels-cpu ")


def test_doctor_tells_the_portable_level(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ops.capabilities()
    for isa, told in (("avx2", False), ("portable", True)):
        monkeypatch.setattr(ops, "capabilities", lambda isa=isa: {**facts, "isa": isa})
        result = here("doctor")
        assert (f"problem: {ops.PORTABLE}" in result.stdout.splitlines()) == told
    assert result.returncode == 78


def test_doctor_tells_a_level_that_there_is_not(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> dict[str, Any]:
        raise ValueError("RADIX_CPU_ISA=foo: expected portable or avx2")

    monkeypatch.setattr(ops.radix_kernels, "capabilities", refused)
    result = here("doctor")
    assert result.returncode == 78
    said = result.stdout.splitlines()
    assert "problem: RADIX_CPU_ISA=foo: expected portable or avx2" in said
    assert "    remedy: name another level, or unset RADIX_CPU_ISA" in said


@pytest.mark.parametrize(
    ("backend", "isa", "why", "remedy"),
    [
        ("cuda", "no device", "the cuda library finds no GPU", "make a GPU visible"),
        ("rocm", "no device", "the rocm library finds no GPU", "make a GPU visible"),
        ("rocm", "no HIP runtime", "no HIP runtime: nowhere", "install ROCm 6.3"),
        ("rocm", "gfx1100", "this GPU is gfx1100", "build a wheel for this GPU"),
    ],
)
def test_doctor_tells_kernels_that_cannot_run_here(
    backend: str,
    isa: str,
    why: str,
    remedy: str,
    here: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about = {"backend": backend, "isa": isa, "devices": [], "problem": why}
    facts = {**ops.capabilities(), **about}
    monkeypatch.setattr(ops, "capabilities", lambda: facts)
    monkeypatch.setattr(ops.radix_kernels, "capabilities", lambda: facts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = here("doctor")
    assert result.returncode == 78
    assert re.search(r"^kernel devices +none$", result.stdout, re.M)
    assert "no problems found" not in result.stdout
    assert f"problem: {why}" in result.stdout
    assert f"    remedy: {remedy}" in result.stdout
    assert "need a GPU" in result.stdout
    assert "install radix-kernels-cpu in its place" in result.stdout


def test_doctor_tells_a_gpu_beside_kernels_of_the_cpu(
    here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ops.capabilities()["backend"] != "cpu":
        pytest.skip("no native CPU library")
    monkeypatch.setattr(Device, "resolve", lambda: Device("cuda", torch.device("cuda", 0)))
    result = here("doctor")
    assert (
        "problem: the installed kernels (radix-kernels-cpu) are not for this GPU" in result.stdout
    )
    assert "    remedy: install radix-kernels-cuda in its place" in result.stdout
