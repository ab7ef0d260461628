"""The products for chips before Hopper on the CPU: CUTLASS's main loop and all, with ldmatrix and
mma.sync emulated."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernel import gpu_objects
from tests.kernel.gpu_objects import ROOT

FOLDER = ROOT / "tests/kernel/emulated_mma"

pytestmark = [pytest.mark.cpu_only, pytest.mark.builds(), pytest.mark.timeout(900)]

# Header of cutlass/arch -> where its code for a compiler that is not nvcc begins, what it says
# there, what is put in that place, and how often. Of ldmatrix those that do not transpose.
EMULATED = {
    "memory_sm75.h": (
        r"ldsm<layout::RowMajor, \d>[^#]*?#if.*?",
        r"CUTLASS_NOT_IMPLEMENTED\(\);",
        "::emulated::load_matrices(D, ptr);",
        3,
    ),
    "mma_sm80.h": (
        r"Matrix Multiply 16832 - S8 input, S32 accumulation - SATURATE.*?",
        r"assert\(0\);",
        "::emulated::multiply<int8_t>(d, a, b, c);",
        1,
    ),
    "mma_sm89.h": (
        r"F32 = fe4m3 \* fe4m3 \+ F32.*?",
        r"CUTLASS_NOT_IMPLEMENTED\(\);",
        "::emulated::multiply<cutlass::float_e4m3_t>(d, a, b, c);",
        1,
    ),
}


def cutlass() -> Path:
    command = [sys.executable, str(ROOT / "tools/fetch_cutlass.py"), "scaled_mm"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if found in ("", "none"):
        pytest.skip("CUTLASS is not there, and cannot be fetched")
    return Path(found, "include")


def cuda_headers() -> Path:
    nvcc = gpu_objects.tool("nvcc", "/usr/local/cuda/bin/nvcc")
    gpu_objects.need("cuda", nvcc)
    places = (Path(str(nvcc)).resolve().parents[1] / "include", Path("/usr/local/cuda/include"))
    found = next((place for place in places if (place / "cuda_runtime.h").exists()), None)
    gpu_objects.need("cuda", found)
    assert found
    return found


def overlay(include: Path, target: Path) -> None:
    """Copies of the headers whose instructions are emulated, to be found before CUTLASS's own."""
    target.mkdir(parents=True)
    for name, (begin, old, new, times) in EMULATED.items():
        text = (include / "cutlass/arch" / name).read_text()
        changed, count = re.subn(f"({begin}){old}", rf"\g<1>{new}", text, flags=re.S)
        assert count == times, name
        (target / name).write_text(changed)


def test_products(tmp_path, rng):
    compiler = gpu_objects.tool("g++")
    gpu_objects.need("c++", compiler)
    include = cutlass()
    cuda = cuda_headers()
    overlay(include, tmp_path / "cutlass/arch")
    csrc = ROOT / "kernel/csrc"
    ours = [f"-I{path}" for path in (tmp_path, FOLDER, ROOT / "kernel/include", csrc)]
    theirs = [f"-I{path}" for path in (include, cuda, cuda / "cccl")]
    program = tmp_path / "scaled_mm"
    # CUTLASS's iterators give a name two meanings, which nvcc lets pass.
    command = [str(compiler), "-std=c++17", "-O1", "-w", "-fpermissive", *ours, *theirs]
    command += ["-include", "device.h", str(FOLDER / "scaled_mm.cpp")]
    command += [str(csrc / "common/error.cpp"), "-o", str(program), "-Wl,--gc-sections"]
    subprocess.run(command, check=True, timeout=600)
    seed = int(torch.randint(2**31 - 1, (), generator=rng))
    done = subprocess.run([program, str(seed)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100_000
