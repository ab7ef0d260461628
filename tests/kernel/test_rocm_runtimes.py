"""The ROCm wheel's first import and first call beside each kind of HIP runtime that a machine may
have: in a process of its own, with copies of the stand-in in the places of torch's, AMD's packages'
and the system's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.gcn import library as stand_in
from tests.gcn.marks import needs_executor
from tests.kernel import gpu_objects, gpu_wheels

pytestmark = [
    pytest.mark.builds("rocm"),
    pytest.mark.timeout(4800),
    needs_executor,
]

SONAME = stand_in.NAME.encode()

# A package that loads its library as torch does, which calls the runtime beside it.
TORCH = """
import ctypes, pathlib
folder = pathlib.Path(__file__).parent / "lib"
ctypes.CDLL(str(folder / "libtorch_hip.so"), mode=ctypes.RTLD_GLOBAL)
class Tensor:
    pass
"""
TORCH_HIP = "int hipGetDeviceCount(int*); int use(int* n) { return hipGetDeviceCount(n); }"
ROCM_SDK = """
import pathlib
def find_libraries(*names):
    assert names == ("amdhip64",)
    return [pathlib.Path(__file__).parents[1] / "_rocm_sdk_core/lib/libamdhip64.so.7"]
"""


# Without this environment's packages, whose torch is not that of the test.
PROGRAM = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("tests.gcn.first_call", run_name="__main__", alter_sys=True)
"""


class Machine:
    """Folders with copies of the runtime, and processes that may find them."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self._wheel = wheel
        self._folder = folder
        self.torch = self._copy("torch/torch/lib/libamdhip64.so", soname=b"libamdhip64.so.6")
        self.sdk = self._copy("sdk/_rocm_sdk_core/lib/libamdhip64.so.7")
        self.system = self._copy("system/lib/libamdhip64.so.7")
        self._write("torch/torch/__init__.py", TORCH)
        self._write("sdk/rocm_sdk/__init__.py", ROCM_SDK)
        self._link_torch()

    def _copy(self, name: str, soname: bytes = SONAME) -> str:
        """Two libraries of one soname are one to the loader, whatever their files."""
        path = self._folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(stand_in.build().read_bytes().replace(SONAME, soname))
        return str(path)

    def _write(self, name: str, text: str) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _link_torch(self) -> None:
        lib = Path(self.torch).parent
        (lib / "libamdhip64.so.6").symlink_to("libamdhip64.so")
        command = [str(stand_in.compiler()), "-shared", "-fPIC", "-xc", "-", "-xnone", self.torch]
        command += ["-Wl,-rpath,$ORIGIN", "-o", str(lib / "libtorch_hip.so")]
        subprocess.run(command, input=TORCH_HIP, text=True, check=True)

    def _numpy(self) -> Path:
        """A folder with numpy and nothing else."""
        folder = self._folder / "numpy"
        if not folder.exists():
            folder.mkdir()
            packages = Path(numpy.__file__).parents[1]
            for name in ("numpy", "numpy.libs"):
                if (packages / name).exists():
                    (folder / name).symlink_to(packages / name)
        return folder

    def folder_of(self, package: str) -> str:
        return str(self._folder / package)

    def run(self, *steps: str, packages: tuple[str, ...] = (), **settings: str) -> dict[str, Any]:
        """What tests.gcn.first_call prints; `packages`: torch and sdk, where they are installed."""
        found = [*map(self.folder_of, packages), str(self._wheel), str(self._numpy())]
        env = stand_in.environment(**{"GCN_TARGET": "gfx942", **settings})
        env["PYTHONPATH"] = os.pathsep.join(found)
        for name in ("RADIX_LIBHIP", "ROCM_PATH", "LD_LIBRARY_PATH"):
            if name not in settings:
                env.pop(name, None)
        done = subprocess.run(
            [sys.executable, "-S", "-c", PROGRAM, str(gpu_objects.ROOT), *steps],
            env=env,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    def with_system(self) -> dict[str, str]:
        return {"ROCM_PATH": self.folder_of("system")}


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Machine:
    folder = tmp_path_factory.mktemp("runtimes")
    wheel = gpu_wheels.library("rocm", folder / "wheel").parents[2]
    return Machine(wheel, folder)


def test_torch_first(machine):
    said = machine.run("torch", "call", packages=("torch", "sdk"), **machine.with_system())
    assert said["call"] == "right"
    assert said["launches"] == {machine.torch: 1}


def test_capabilities_first(machine):
    """torch's copy is opened before torch is imported, and stays the only one."""
    steps = ("capabilities", "torch", "call")
    said = machine.run(*steps, packages=("torch", "sdk"), **machine.with_system())
    assert (said["isa"], said["problem"], said["devices"]) == ("gfx942", "", ["rocm"])
    assert os.path.samefile(said["runtime"], machine.torch)
    assert said["call"] == "right"
    assert said["launches"] == {machine.torch: 1}


def test_the_runtime_of_amd_s_packages(machine):
    said = machine.run("capabilities", "call", packages=("sdk",), **machine.with_system())
    assert said["runtime"] == machine.sdk
    assert said["call"] == "right" and said["launches"] == {machine.sdk: 1}


def test_the_system_s(machine):
    said = machine.run("capabilities", "call", **machine.with_system())
    assert said["runtime"] == machine.system
    assert said["call"] == "right" and said["launches"] == {machine.system: 1}


def test_two_copies(machine):
    """Launches go to the one that torch calls, whichever was there first."""
    settings = machine.with_system()
    before = machine.run("load", machine.system, "torch", "call", packages=("torch",), **settings)
    after = machine.run("torch", "load", machine.system, "call", packages=("torch",), **settings)
    for said in (before, after):
        assert said["call"] == "right"
        assert said["launches"] == {machine.torch: 1, machine.system: 0}


def test_torch_that_is_found_after_the_first_call(machine):
    steps = ("call", "find", machine.folder_of("torch"), "torch", "call", "capabilities")
    said = machine.run(*steps, **machine.with_system())
    assert said["call"] == "right"
    assert said["launches"] == {machine.torch: 1, machine.system: 1}
    assert os.path.samefile(said["runtime"], machine.torch)


def test_two_copies_without_torch(machine):
    said = machine.run("load", machine.system, "load", machine.sdk, "capabilities", "call")
    assert said["isa"] == "no HIP runtime" and said["devices"] == []
    assert said["problem"].startswith("two HIP runtimes are loaded, and torch uses neither: ")
    assert said["problem"] in said["call"]
    assert set(said["launches"].values()) == {0}


def test_no_hip(machine):
    said = machine.run("capabilities", "call")
    assert (said["isa"], said["devices"], said["runtime"]) == ("no HIP runtime", [], "")
    assert said["problem"].startswith("no HIP runtime: libamdhip64.so.7: cannot open shared object")
    assert said["problem"] in said["call"]
    assert said["launches"] == {}


def test_hip_without_a_gpu(machine):
    said = machine.run("capabilities", "call", GCN_DEVICES="0", **machine.with_system())
    assert (said["isa"], said["devices"]) == ("no device", [])
    assert said["problem"] == "the rocm library finds no GPU"
    assert "no ROCm-capable device is detected" in said["call"]
    assert said["launches"] == {machine.system: 0}


def test_an_unknown_gpu(machine):
    said = machine.run("capabilities", "call", **{**machine.with_system(), "GCN_TARGET": "gfx1100"})
    assert (said["isa"], said["devices"], said["impl"]) == ("gfx1100", [], "reference")
    assert said["problem"].startswith("the rocm library has code for gfx")
    assert said["problem"].endswith("this GPU is gfx1100")
    assert said["problem"] in said["call"]
    assert said["launches"] == {machine.system: 0}
