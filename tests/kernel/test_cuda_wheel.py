"""The CUDA wheel, built here: what code it holds for each GPU, and that it imports without one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.kernel import gpu_objects
from tests.kernel.gpu_objects import COLLECTIVES, FINISHERS, CudaKernel

pytestmark = pytest.mark.timeout(4800)  # the first test compiles the wheel

# A release has code for all of these; compiling it takes the better part of an hour on two cores.
RELEASE = ("sm_80", "sm_89", "sm_90a", "sm_100")
MACHINE_CODE = RELEASE if os.environ.get("RADIX_TEST_FULL") else ("sm_90a",)
ARCHS = ";".join(f"{arch.removeprefix('sm_')}-real" for arch in MACHINE_CODE) + ";80-virtual"
PTX = "sm_80"
HOPPER = "sm_90a"  # has kernels of its own, csrc/cuda
PORTABLE = gpu_objects.kernels_of(warp=32)
SMALL_BLOCKS = gpu_objects.pointwise_kernels_of(warp=32) | gpu_objects.ROUTERS  # 512 threads at most
SHARED_BYTES = 49152  # what a kernel may have without asking
# What an SM has, over the 1,024 threads of the largest block.
REGISTERS = 64
# The slow path of a division or square root is a call, which saves a few registers.
STACK_BYTES = 32
CALLS_STACK_BYTES = 512  # of the finishers, which call their slow ways
# Hopper kernels that spill more, outside of their inner loops: the producer of prefill has 40 registers a thread.
SPILLS = {"prefill_kernel": 112, "decode_kernel": 128, "mla_narrow_kernel": 408, "mla_wide_kernel": 96}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    nvcc = gpu_objects.tool("nvcc", "/usr/local/cuda/bin/nvcc")
    gpu_objects.need("cuda", nvcc and gpu_objects.cuobjdump())
    return gpu_objects.build_wheel("cuda", tmp_path_factory.mktemp("cuda"), ARCHS)


@pytest.fixture(scope="module")
def kernels(library) -> dict[str, dict[str, CudaKernel]]:
    return gpu_objects.cuda_kernels(library)


@pytest.mark.parametrize("arch", MACHINE_CODE)
def test_every_kernel_is_there(kernels, arch):
    found = set(kernels[arch])
    assert found == PORTABLE if arch != HOPPER else found > PORTABLE


def test_no_other_architecture(kernels):
    assert set(kernels) == set(MACHINE_CODE)


def test_ptx_for_later_gpus(library):
    found = gpu_objects.ptx_kernels(library)
    assert {arch: names for arch, names in found.items() if names} == {PTX: PORTABLE}


@pytest.mark.parametrize("arch", MACHINE_CODE)
def test_kernels_fit_the_gpu(kernels, arch):
    for name in PORTABLE:
        kernel = kernels[arch][name]
        wide = name in SMALL_BLOCKS or (name in COLLECTIVES and "norm" not in name)  # blocks of 512 threads at most
        assert kernel.registers <= (2 if wide else 1) * REGISTERS, (name, kernel)
        assert kernel.shared <= SHARED_BYTES and kernel.local == 0, (name, kernel)
        assert kernel.stack <= (CALLS_STACK_BYTES if name in FINISHERS else STACK_BYTES), (name, kernel)


def test_hopper_kernels_do_not_spill(kernels):
    """Their registers and shared memory are what their launches ask for: docs/kernels has each kernel's share."""
    for name in set(kernels[HOPPER]) - PORTABLE:
        kernel = kernels[HOPPER][name]
        most = SPILLS.get(name.partition("<")[0], STACK_BYTES)
        assert kernel.local == 0 and kernel.stack <= most, (name, kernel)


def test_registers_come_back_after_a_barrier(library):
    """MLA's producer (with an FP8 cache the scorer too) gives registers to two warpgroups and takes them back once they
    have them, not before; and PTX wants a warpgroup to meet between two exchanges."""
    found = gpu_objects.cuda_operations(library, "mla_wide_kernel")
    assert len(found) == 3
    for name, operations in found.items():
        fp8 = "ELb1E" in name
        back = f"BAR.SYNC 0x4, {'0x200' if fp8 else '0x180'}"
        plain = [re.sub(r"\.DEFER_BLOCKING|\.CTAPOOL( UP\d,)?", "", op) for op in operations]
        taken = plain.index(f"USETMAXREG.TRY_ALLOC {'0xa0' if fp8 else '0xa8'}")
        assert plain[taken + 1] == back.replace("SYNC", "ARV"), plain
        assert plain[plain.index("USETMAXREG.DEALLOC 0x80") - 1] in ("BAR.SYNC 0x1, 0x80", "BAR.SYNC 0x2, 0x80"), plain
        given = [i for i, op in enumerate(plain) if op == f"USETMAXREG.DEALLOC {'0x60' if fp8 else '0x30'}"]
        assert len(given) == (2 if fp8 else 1), plain
        for i in given:
            assert plain[plain.index("USETMAXREG.TRY_ALLOC 0x80", i) - 1] == back, plain


def test_nothing_of_cuda_is_linked(library):
    dynamic = subprocess.run(
        ["readelf", "-W", "-d", "--dyn-syms", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert not re.search(r"NEEDED.*(cuda|cudart|nvidia|torch|c10)", dynamic)
    symbols = re.findall(r"UND (\S+)", dynamic)
    assert not [name for name in symbols if re.match(r"cu[A-Z]|cuda|__cuda", name)]


def test_import_without_a_gpu(library):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    facts = gpu_objects.importable(library.parents[2])
    assert facts.startswith("cuda|no device|['cpu']|\n")
    assert "'impl': 'cuda:no device'" in facts
