"""`radix doctor`: what is installed and what the machine has, or of a model (doctor_model.py); each
problem with its remedy."""

import argparse
import os
import platform
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from pathlib import Path

from rich.console import Console

from .. import __version__
from ..errors import EXIT_CONFIG, ConfigError
from . import doctor_model
from .doctor_facts import Facts, Problem

_GIB = 1 << 30
_NAME_WIDTH = 18  # of the first column, at least
_MIN_DRIVER = 580
_REINSTALL = "reinstall the kernel wheel"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `radix doctor`."""
    doctor_model.add_arguments(parser)
    parser.add_argument("--ops", action="store_true", help="list which kernel serves each op")


def run(namespace: argparse.Namespace) -> int:
    """Prints facts, then problems; EXIT_CONFIG if there are any."""
    console = Console(soft_wrap=True)
    problems: list[Problem] = []
    sections: list[Callable[[], Facts]] = [_packages, _kernels, _machine, _gpu]
    usual = _REINSTALL
    if namespace.model is None:
        doctor_model.require_none(namespace)
    else:
        sections = [partial(doctor_model.model_facts, namespace)]
        usual = ""  # most are of the model's files, and their messages say all
    if namespace.ops:
        sections.append(_ops)
    for section in sections:
        problems += _print_section(console, section, usual)
    for what, remedy in dict.fromkeys(problems):
        console.print(f"problem: {what}", style="bold red", markup=False, highlight=False)
        if remedy:
            console.print(f"    remedy: {remedy}", markup=False, highlight=False)
    if not problems:
        console.print("[green]no problems found[/]")
    return EXIT_CONFIG if problems else 0


def _print_section(console: Console, section: Callable[[], Facts], usual: str) -> list[Problem]:
    """Prints the facts of a section; its problems. `usual`: see `_problem_of`."""
    problems: list[Problem] = []
    rows: list[tuple[str, object]] = []
    try:
        for fact in section():
            if isinstance(fact, Problem):
                problems.append(fact)
            else:
                rows.append(fact)
    except (ConfigError, ImportError) as error:
        problems.append(_problem_of(error, usual))
    width = max([_NAME_WIDTH, *(len(name) for name, _ in rows)])
    for name, value in rows:
        console.print(f"{name:<{width}} {value}", markup=False, highlight=False)
    return problems


def _problem_of(error: ConfigError | ImportError, usual: str) -> Problem:
    """`usual`: the remedy where the message names none."""
    if isinstance(error, ImportError):
        remedy = "pip install torch" if error.name == "torch" else _REINSTALL
        return Problem(f"{error.name} does not load: {error}", remedy)
    if not usual:
        return Problem(str(error), "")
    # The message may end with what to do.
    what, *remedies = re.split("[;.] ", str(error), maxsplit=1)
    return Problem(what, remedies[0] if remedies else usual)


def _packages() -> Facts:
    yield "radix-runtime", __version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    installed = {package.name: package.version for package in metadata.distributions()}
    for name in ("torch", "transformers", "tokenizers", "triton"):
        yield name, installed.get(name, "not installed")
    wheels = [
        f"{name} {installed[name]}"
        for name in sorted(installed)
        if name.startswith("radix-kernels-")
    ]
    yield "kernel wheel", ", ".join(wheels) or "none"


def _kernels() -> Facts:
    ops = import_module("radix_runtime.ops")
    facts = ops.capabilities()
    yield "kernel library", f"{facts['version']}, backend {facts['backend']}"
    yield "instruction set", facts["isa"]
    yield "kernel devices", ", ".join(facts["devices"]) or "none"
    if facts["runtime"]:
        yield "hip runtime", facts["runtime"]
    if facts["backend"] is None:
        yield Problem(
            "no native kernels: all would run on the slow reference",
            "install a kernel wheel (`make wheel`)",
        )
    elif facts["problem"]:
        yield Problem(facts["problem"], _remedy(facts["isa"]))
    if facts["isa"] == "portable":
        yield Problem(ops.PORTABLE, "use a CPU with AVX2, or unset RADIX_CPU_ISA")


def _remedy(isa: str) -> str:
    """For kernels of a GPU library that cannot run here."""
    if isa == "no HIP runtime":
        return "install ROCm 6.3 or later, or name its libamdhip64.so in RADIX_LIBHIP"
    if isa == "no device":
        return "make a GPU visible (its driver, HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES)"
    return "build a wheel for this GPU (make wheel BACKEND=rocm ARCHS=...)"


def _ops() -> Facts:
    for op, by_dtype in import_module("radix_runtime.ops").capabilities()["ops"].items():
        implementations = [entry["impl"] for entry in by_dtype.values()]
        if len(set(implementations)) == 1:
            yield f"  {op}", implementations[0]
        else:
            yield f"  {op}", ", ".join(f"{name} {e['impl']}" for name, e in by_dtype.items())


def _machine() -> Facts:
    yield "cpu cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    memory = import_module("radix_runtime.device").cpu_memory()
    yield "memory", f"{memory.available / _GIB:.1f} GiB available of {memory.total / _GIB:.1f}"
    if memory.available < _GIB:
        yield Problem("less than 1 GiB of memory is available", "free memory, or raise the limit")
    yield "default threads", import_module("radix_runtime.distributed").core_share(0, 1)[0]


def _gpu() -> Facts:
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        line = driver.read_text().splitlines()[0]
        yield "nvidia driver", line
        version = re.search(r"\b(\d+)\.\d+", line)
        if version is not None and int(version[1]) < _MIN_DRIVER:
            what = f"driver {version[1]} is too old"
            yield Problem(what, f"install driver {_MIN_DRIVER} or later")
    torch = import_module("torch")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield f"gpu {index}", f"{facts.name}, {facts.total_memory / _GIB:.0f} GiB"
    if not torch.cuda.is_available():
        yield "gpu", "none that torch can use"
        if driver.is_file() and torch.version.cuda is None:
            yield Problem("there is a GPU, but torch is a CPU build", "install torch for CUDA")
    kind = import_module("radix_runtime.device").Device.resolve().kind
    import_module("radix_runtime.ops").check_device(kind)
