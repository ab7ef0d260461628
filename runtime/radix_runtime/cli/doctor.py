"""`radix doctor`: what is installed and what the machine has; each problem with its remedy."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import __version__
from ..errors import EXIT_CONFIG, ConfigError

_WHEELS = ("radix-kernels-cpu", "radix-kernels-cuda", "radix-kernels-rocm")
_GIB = 1 << 30
_MIN_DRIVER = 580

Row = tuple[str, str]


class Findings:
    """Rows of the table, and problems as (what, remedy)."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.problems: list[Row] = []

    def row(self, name: str, value: object) -> None:
        self.rows.append((name, str(value)))

    def problem(self, what: str, remedy: str) -> None:
        self.problems.append((what, remedy))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", action="store_true", help="list which kernel serves each op")


def run(namespace: argparse.Namespace) -> int:
    findings = Findings()
    sections: list[Callable[[Findings], None]] = [_versions, _kernels, _cpu, _memory, _gpu]
    if namespace.ops:
        sections.append(_ops)
    for section in sections:
        section(findings)
    console = Console(soft_wrap=True)
    table = Table(show_header=False, box=None)
    for row in findings.rows:
        table.add_row(*row)
    console.print(table)
    for what, remedy in findings.problems:
        console.print(f"[bold red]problem:[/] {what}\n    [bold]remedy:[/] {remedy}")
    if not findings.problems:
        console.print("[green]no problems found[/]")
    return EXIT_CONFIG if findings.problems else 0


def _versions(findings: Findings) -> None:
    findings.row("radix-runtime", __version__)
    findings.row("python", f"{platform.python_version()} on {platform.platform()}")
    for name in ("torch", "transformers", "tokenizers", "triton"):
        findings.row(name, _version(name) or "not installed")


def _optional(module: str, findings: Findings) -> Any:
    """A module of ours that needs torch or the kernel wheel, whose absence is to be reported."""
    try:
        return import_module(f"radix_runtime.{module}")
    except ConfigError as error:
        what, _, remedy = str(error).partition("; ")
        findings.problem(what, remedy or "reinstall the kernel wheel")
    except ImportError as error:
        findings.problem(f"{error.name or module} does not load: {error}", "pip install torch")
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernels(findings: Findings) -> None:
    installed = [f"{name} {v}" for name in _WHEELS if (v := _version(name))]
    findings.row("kernel wheel", ", ".join(installed) or "none")
    if len(installed) > 1:
        findings.problem(
            f"{len(installed)} kernel wheels are installed at once",
            f"pip uninstall {' '.join(_WHEELS)}, then install one of them",
        )
    ops = _optional("ops", findings)
    if ops is None:
        return
    facts = ops.capabilities()
    findings.row("kernel library", f"{facts['version']}, backend {facts['backend']}")
    findings.row("instruction set", facts["isa"])
    findings.row("kernel devices", ", ".join(facts["devices"]))
    if facts["backend"] is None:
        findings.problem(
            "no native kernels: everything would run on the slow reference",
            "install a kernel wheel, or build one with `make wheel`",
        )


def _ops(findings: Findings) -> None:
    ops = _optional("ops", findings)
    for op, kinds in ops.capabilities()["ops"].items() if ops else ():
        impls = {name: entry["impl"] for name, entry in kinds.items()}
        same = len(set(impls.values())) == 1
        text = next(iter(impls.values())) if same else str(impls)
        findings.row(f"  {op}", text)


def _cpu(findings: Findings) -> None:
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    text = f"{cores} usable of {os.cpu_count()}"
    findings.row("cpu cores", text if quota is None else f"{text}, cgroup quota {quota:g}")
    if quota is not None and quota < cores:
        findings.problem(
            f"the cgroup allows {quota:g} cores of time on {cores} cores",
            f"start with --num-threads {max(1, int(quota))}",
        )


def _cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores of CPU time that cgroup v2 grants, if it limits them."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def _memory(findings: Findings) -> None:
    device = _optional("device", findings)
    if device is None:
        return
    memory = device.cpu_memory()
    findings.row("memory", f"{memory.available / _GIB:.1f} GiB available of {memory.total / _GIB:.1f}")
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    findings.row("/dev/shm", f"{shm / _GIB:.1f} GiB free")
    if memory.available < _GIB:
        findings.problem("less than 1 GiB of memory is available", "free memory, or raise the limit")


def _gpu(findings: Findings) -> None:
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        line = driver.read_text().splitlines()[0]
        findings.row("nvidia driver", line)
        major = next((int(w.split(".")[0]) for w in line.split() if w.count(".") >= 1
                      and w.split(".")[0].isdigit()), None)  # fmt: skip
        if major is not None and major < _MIN_DRIVER:
            findings.problem(f"driver {major} is too old", f"install driver {_MIN_DRIVER} or later")
    try:
        import torch
    except ImportError:
        findings.problem("torch is not installed", "pip install torch")
        return
    if not torch.cuda.is_available():
        findings.row("gpu", "none that torch can use")
        if driver.is_file() and torch.version.cuda is None:
            findings.problem("there is a GPU, but torch is a CPU build", "install torch for CUDA")
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        findings.row(f"gpu {index}", f"{facts.name}, {facts.total_memory / _GIB:.0f} GiB")
