"""Which copy of the HIP runtime the library calls where a process has several, or may have.

The library's loader of the runtime (csrc/rocm) beside small copies of a runtime, in a process for
each case. test_rocm_wheel.py does the same with the wheel and the executor.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gcn import library

pytestmark = pytest.mark.skipif(not library.compiler(), reason="needs g++")

CSRC = library.ROOT / "kernel/csrc"
SOURCES = Path(__file__).with_name("copies")
TORCHS = 1  # GPUs of the copy that torch brings
SYSTEMS = 2
OTHER = 3


def compile_library(out: Path, *arguments: str) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [str(library.compiler()), "-shared", "-fPIC", "-O1", "-w", *arguments, "-o", str(out)]
    subprocess.run(command, check=True)
    return out


def runtime(path: Path, gpus: int, *flags: str) -> Path:
    name = f"-Wl,-soname,{path.name}"
    return compile_library(path, f"-DGPUS={gpus}", *flags, name, "-xc", str(SOURCES / "runtime.c"))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """opt/ in the place of /opt, torch/lib and system/lib with a runtime each, and probe.so."""
    folder = tmp_path_factory.mktemp("copies")
    runtime(folder / "torch/lib/libamdhip64.so", TORCHS)
    runtime(folder / "system/lib/libamdhip64.so.7", SYSTEMS)
    compile_library(
        folder / "torch/lib/libtorch_hip.so",
        "-xc",
        str(SOURCES / "torch.c"),
        "-xnone",
        str(folder / "torch/lib/libamdhip64.so"),
        "-Wl,-rpath,$ORIGIN",
    )
    compile_library(
        folder / "probe.so",
        "-std=c++17",
        "-fvisibility=hidden",
        f'-DRK_ROCM_PARENT="{folder}/opt"',
        f"-I{CSRC}",
        *map(str, (SOURCES / "probe.cpp", *sorted((CSRC / "rocm").glob("hip_*.cpp")))),
    )
    return folder


# A machine with ROCm: the loader finds a runtime by its name before those of a test.
_FIND = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_NAMES = ("libamdhip64.so.7", "libamdhip64.so.6")
without_rocm = pytest.mark.skipif(
    any(
        subprocess.run([sys.executable, "-c", _FIND, n], capture_output=True).returncode == 0
        for n in _NAMES
    ),
    reason="ROCm is installed",
)

_BEGIN = """
import ctypes, sys
from pathlib import Path
place = Path(sys.argv[1])
torchs, systems = place / "torch/lib/libamdhip64.so", place / "system/lib/libamdhip64.so.7"
probe = ctypes.CDLL(str(place / "probe.so"))
probe.probe_path.restype = probe.probe_problem.restype = ctypes.c_char_p
def load(path, mode=ctypes.RTLD_LOCAL):
    return ctypes.CDLL(str(path), mode=mode)
def import_torch():
    return load(place / "torch/lib/libtorch_hip.so", ctypes.RTLD_GLOBAL)
def bundle(path):
    probe.probe_bundle(str(path).encode())
def ask():
    print(probe.probe_gpus(), probe.probe_path().decode(), probe.probe_problem().decode(), sep="|")
"""


def asked(place: Path, code: str, **settings: str) -> list[tuple[int, str, str]]:
    """(GPUs, path, problem) for each `ask()` of the code, in a process of its own."""
    env = {**os.environ, **settings}
    for name in ("RADIX_LIBHIP", "ROCM_PATH", "LD_LIBRARY_PATH"):
        if name not in settings:
            env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + code, str(place)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines()]
    return [(int(gpus), path, problem) for gpus, path, problem in rows]


def gpus(place: Path, code: str, **settings: str) -> list[int]:
    return [row[0] for row in asked(place, code, **settings)]


def system(place: Path) -> dict[str, str]:
    return {"ROCM_PATH": str(place / "system")}


def test_torch_first(place):
    assert gpus(place, "import_torch(); ask()", **system(place)) == [TORCHS]


def test_the_library_first_opens_torch_s_copy(place):
    code = """
bundle(torchs); ask()
assert str(systems) not in Path("/proc/self/maps").read_text()
import_torch(); ask()
assert str(systems) not in Path("/proc/self/maps").read_text()
assert load(torchs).fake_modules() == 1  # told of the library's code once
"""
    assert gpus(place, code, **system(place)) == [TORCHS, TORCHS]


def test_torch_that_nobody_could_find_takes_over(place):
    code = "ask(); import_torch(); ask(); load(systems); ask()"
    assert gpus(place, code, **system(place)) == [SYSTEMS, TORCHS, TORCHS]


@pytest.mark.parametrize("before", [True, False])
def test_of_two_the_one_that_torch_calls(place, before):
    steps = ["load(systems)", "import_torch()"]
    code = "; ".join(steps if before else steps[::-1])
    assert gpus(place, f"{code}; ask()") == [TORCHS]


def test_torch_may_call_a_copy_that_is_not_its_own(place):
    """A copy that all libraries see comes before those that torch is linked with."""
    code = """
load(systems, ctypes.RTLD_GLOBAL)
print(import_torch().torch_gpus(), "", "", sep="|")
ask()
"""
    assert gpus(place, code) == [SYSTEMS, SYSTEMS]


def test_one_that_is_loaded_comes_before_torch_s(place):
    code = """
bundle(torchs); load(systems); ask()
assert str(torchs) not in Path("/proc/self/maps").read_text()
"""
    assert gpus(place, code) == [SYSTEMS]


def test_two_without_torch(place):
    runtime(place / "other/libamdhip64.so.6", OTHER)
    load = "load(systems); load(place / 'other/libamdhip64.so.6')"
    ((count, path, problem),) = asked(place, f"{load}; ask()")
    assert (count, path) == (-1, "")
    assert problem.startswith("two HIP runtimes are loaded") and "RADIX_LIBHIP" in problem
    assert "system/lib/libamdhip64.so.7" in problem and "other/libamdhip64.so.6" in problem
    assert gpus(place, f"bundle(systems); {load}; ask()") == [SYSTEMS]
    wanted = str(place / "other/libamdhip64.so.6")
    assert gpus(place, f"bundle(systems); {load}; ask()", RADIX_LIBHIP=wanted) == [OTHER]


def test_the_variable_opens_no_second_one(place):
    wanted = str(place / "torch/lib/libamdhip64.so")
    assert gpus(place, "ask()", RADIX_LIBHIP=wanted, **system(place)) == [TORCHS]
    ((count, _, problem),) = asked(place, "load(systems); ask()", RADIX_LIBHIP=wanted)
    assert count == -1
    loaded = place / "system/lib/libamdhip64.so.7"
    assert problem == f"RADIX_LIBHIP is {wanted}, but the process has loaded {loaded}"


def test_the_variable_may_be_a_name(place):
    settings = {"LD_LIBRARY_PATH": str(place / "system/lib"), "RADIX_LIBHIP": "libamdhip64.so.7"}
    code = "ask(); load(place / 'probe.so'); load(place / 'torch/lib/libtorch_hip.so'); ask()"
    assert gpus(place, code, **settings) == [SYSTEMS, SYSTEMS]


@without_rocm
def test_places_of_the_system(place, request):
    """$ROCM_PATH, the loader's own, /opt/rocm, /opt/rocm-*, /opt/rocm/core-*; 7 before 6, no 5."""
    request.addfinalizer(lambda: shutil.rmtree(place / "opt"))
    found = []
    for number, name in enumerate(
        (
            "opt/rocm/core-7.14/lib/libamdhip64.so.7",
            "opt/rocm-6.3.1/lib/libamdhip64.so.6",
            "opt/rocm-6.10.0/lib/libamdhip64.so.6",
            "opt/rocm/lib/libamdhip64.so.6",
            "opt/rocm/lib/libamdhip64.so.7",
            "loader/libamdhip64.so.6",
            "rocm/lib/libamdhip64.so.6",
        ),
        start=10,
    ):
        runtime(place / name, number)
        runtime(place / "loader/libamdhip64.so.5", 5)
        runtime(place / "opt/rocm/lib/libamdhip64.so", 5)
        settings = {"LD_LIBRARY_PATH": str(place / "loader"), "ROCM_PATH": str(place / "rocm")}
        found += asked(place, "ask()", **settings)
    assert [row[0] for row in found] == list(range(10, 17))
    assert found[-2][1] == str(place / "loader/libamdhip64.so.6")


@without_rocm
def test_no_hip(place):
    ((count, path, problem),) = asked(place, "ask()")
    assert (count, path) == (-1, "")
    assert problem.startswith("no HIP runtime: libamdhip64.so.7: cannot open shared object file")
    assert "libamdhip64.so.6: cannot open" in problem and "so.5" not in problem


@without_rocm
def test_hip_that_comes_later(place):
    assert gpus(place, "ask(); load(systems); ask()") == [-1, SYSTEMS]


def test_an_old_hip(place):
    old = runtime(place / "old/libamdhip64.so.5", OTHER, "-DHIP_5")
    ((count, _, problem),) = asked(place, f"load({str(old)!r}); ask()")
    assert count == -1
    assert problem == f"no HIP runtime: {old} is older than HIP 6"
