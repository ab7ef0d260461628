"""The wheels of the GPU backends, built by the tests: from when they are collected, on what the
other tests leave idle.

`conftest.py` starts the builds that the marker `builds` asks for, and puts the tests that wait
for them last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO

import pytest

from tests.kernel import gpu_objects
from tests.kernel.gpu_objects import ROOT

# dist/ may hold a release.
FOLDER = ROOT / "build/test-wheels"
# A release has CUDA code for all of these; compiling it takes ten minutes on two idle cores.
RELEASE = ("sm_80", "sm_89", "sm_90a", "sm_100")
CUDA_CODE = RELEASE if os.environ.get("RADIX_TEST_FULL") else ("sm_90a",)
ARCHS = {
    "cuda": ";".join(f"{arch.removeprefix('sm_')}-real" for arch in CUDA_CODE) + ";80-virtual",
    "rocm": "",
}
_REQUIRED = {"cuda": "cuda", "rocm": "hip"}  # what REQUIRE calls a backend
_TIMEOUT = 4500

_builds: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}


def start(backend: str) -> None:
    """Begins to build (incrementally) the backend's wheel behind everything else; nothing without
    its compiler."""
    if backend in _builds or not _compiler_is_there(backend):
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    output = (FOLDER / f"{backend}.log").open("w+b")
    command = [
        sys.executable,
        "tools/build_wheel.py",
        backend,
        "--dist",
        str(FOLDER),
        "--archs",
        ARCHS[backend],
    ]
    if nice := shutil.which("nice"):
        command = [nice, "-n", "19", *command]
    _builds[backend] = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output), output


def library(backend: str, folder: Path) -> Path:
    """Waits for the wheel, unpacks it into `folder` and returns the library's path. Without a
    compiler the tests are skipped, or fail where REQUIRE names it."""
    start(backend)
    gpu_objects.need(_REQUIRED[backend], backend in _builds)
    build, output = _builds[backend]
    if build.wait(_TIMEOUT):
        output.seek(0)
        pytest.fail(output.read()[-6000:].decode(errors="replace"))
    (wheel,) = FOLDER.glob(f"radix_kernels_{backend}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "radix_kernels/lib/libradix_kernels.so"


def stop() -> None:
    """Ends builds that nobody waits for any more, with their compilers."""
    for build, output in _builds.values():
        if build.poll() is None:
            import psutil

            for process in [build, *psutil.Process(build.pid).children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            build.wait()
        output.close()
    _builds.clear()


def _compiler_is_there(backend: str) -> bool:
    if backend == "cuda":
        return bool(
            gpu_objects.tool("nvcc", "/usr/local/cuda/bin/nvcc") and gpu_objects.cuobjdump()
        )
    compiler = gpu_objects.llvm("clang++") or gpu_objects.tool("amdclang++")
    header = any(
        Path(place, "hip/hip_runtime.h").exists() for place in ("/usr/include", "/opt/rocm/include")
    )
    return bool(
        compiler
        and header
        and all(map(gpu_objects.llvm, ("llvm-readelf", "llvm-objdump", "ld.lld")))
    )
