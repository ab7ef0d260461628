"""The launch of the FP8 product of sm_100, compiled, with a stand-in for CUDA's runtime."""

from __future__ import annotations

import subprocess

import pytest

from tests.kernel import gpu_objects
from tests.kernel.gpu_objects import ROOT
from tests.kernel.test_emulated_mma import cuda_headers, cutlass

pytestmark = [pytest.mark.cpu_only, pytest.mark.builds(), pytest.mark.timeout(900)]

# Tiles of 128 x 128 of a weight of 528 rows. 1: cudaErrorInvalidValue, 209: no kernel image.
SAID = """1 x 5 x 1 of 256, fits: ok, pending 0
3 x 5 x 1 of 256, fits: ok, pending 1
3 x 5 x 1 of 256, fits: fp8_scaled_mm: no kernel image, pending 209
"""


def test_an_error_is_its_own_launchs(tmp_path):
    """Somebody else's that is pending neither fails the product nor is taken away; its own is told
    in CUDA's words."""
    nvcc = gpu_objects.tool("nvcc", "/usr/local/cuda/bin/nvcc")
    gpu_objects.need("cuda", nvcc)
    cuda = cuda_headers()
    csrc = ROOT / "kernel/csrc"
    ours = [f"-I{path}" for path in (ROOT / "kernel/include", csrc)]
    product = tmp_path / "product.o"
    command = [str(nvcc), "-std=c++17", "-O2", "-DNDEBUG", "-w", "--expt-relaxed-constexpr", *ours]
    command += ["-arch=sm_100a", "-isystem", str(cutlass()), "-o", str(product)]
    command += ["-c", str(csrc / "sm100/scaled_mm/fp8.cu")]
    subprocess.run(command, check=True, timeout=600)
    program = tmp_path / "launch"
    compiler = gpu_objects.tool("g++", "c++")
    gpu_objects.need("c++", compiler)
    command = [str(compiler), "-std=c++17", "-w", *ours, f"-I{cuda}"]
    command += [str(ROOT / "tests/kernel/launch_sm100.cpp"), str(product)]
    command += [str(csrc / "common/error.cpp"), "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 2 * SAID
