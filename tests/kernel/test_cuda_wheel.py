"""The CUDA wheel, built here: what code it holds for each GPU, and that it imports without one."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from tests.kernel import gpu_objects, gpu_wheels, portable_kernels
from tests.kernel.gpu_objects import CudaKernel
from tests.kernel.gpu_wheels import CUDA_CODE as MACHINE_CODE
from tests.kernel.hopper_usage import LIMITS, pattern_of
from tests.kernel.portable_kernels import FINISHERS, SMALL_BLOCKS, base_of

# The first test may wait for the compiler.
pytestmark = [
    pytest.mark.builds("cuda"),
    pytest.mark.timeout(4800),
]

PTX = "sm_80"
# The kernels of csrc/sm80, machine code and PTX of one chip each, and the most registers of a
# thread, as measured with nvcc 13.0; no stack, so that none can begin to spill.
MMA_SYNC = {
    "sm_80": {
        "scaled_mm_kernel<signed char, MmaTile<16, 64, 128, 16, 16, 4> >": 56,
        "scaled_mm_kernel<signed char, MmaTile<64, 64, 128, 32, 32, 3> >": 96,
        "scaled_mm_kernel<signed char, MmaTile<128, 128, 64, 64, 64, 4> >": 248,
    },
    "sm_89": {
        "scaled_mm_kernel<e4m3, MmaTile<16, 64, 128, 16, 16, 4> >": 64,
        "scaled_mm_kernel<e4m3, MmaTile<64, 64, 128, 32, 32, 3> >": 128,
        "scaled_mm_kernel<e4m3, MmaTile<128, 128, 128, 64, 32, 3> >": 248,
    },
}
# CUTLASS's own kernel, of csrc/sm100: machine code alone.
SM100 = {
    "device_kernel<Sm100Product<bfloat16_t> >": 208,
    "device_kernel<Sm100Product<half_t> >": 208,
}
CUTLASS = MMA_SYNC | {"sm_100a": SM100}
HOPPER = "sm_90a"  # has kernels of its own, csrc/sm90
SHARED_BYTES = 49152  # what a kernel may have without asking
# What an SM has, over the 1,024 threads of the largest block.
REGISTERS = 64
# The slow path of a division or square root is a call, which saves a few registers.
STACK_BYTES = 32
QUANTIZED_STACK_BYTES = 48  # in FP8, of rows that wait in registers
QUANTIZED = {"norm_kernel", "row_kernel"}
CALLS_STACK_BYTES = 512  # of the finishers, which call their slow ways


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return gpu_wheels.library("cuda", tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def kernels(library) -> dict[str, dict[str, CudaKernel]]:
    return gpu_objects.cuda_kernels(library)


@pytest.fixture(scope="module")
def ptx(library) -> dict[str, set[str]]:
    found = gpu_objects.ptx_kernels(library)
    return {arch: names for arch, names in found.items() if names}


@pytest.fixture(scope="module")
def portable(ptx) -> set[str]:
    """The kernels of csrc/gpu: those that there is PTX of, for GPUs to come."""
    assert set(ptx) == {PTX, *MMA_SYNC}
    return ptx[PTX] - set(MMA_SYNC[PTX])


def test_every_portable_kernel_is_there(portable):
    assert {base_of(name) for name in portable} == portable_kernels.declared()
    assert not portable_kernels.missing_types(portable)


@pytest.mark.parametrize("arch", MACHINE_CODE)
def test_every_gpu_has_them(kernels, portable, arch):
    found = set(kernels[arch]) - set(MMA_SYNC.get(arch, ()))
    assert found == portable if arch != HOPPER else found > portable


def test_no_other_architecture(kernels):
    assert set(kernels) == {*MACHINE_CODE, *CUTLASS}


@pytest.mark.parametrize("arch", CUTLASS)
def test_kernels_for_chips_beside_hopper(kernels, ptx, portable, arch):
    """Their dynamic shared memory is in a static assert."""
    expected = CUTLASS[arch]
    assert set(kernels[arch]) - portable == set(expected)
    assert ptx.get(arch, set()) - portable == set(MMA_SYNC.get(arch, ()))
    for name, registers in expected.items():
        kernel = kernels[arch][name]
        assert kernel.registers <= registers, (name, kernel)
        assert kernel.stack == kernel.local == 0, (name, kernel)


@pytest.mark.parametrize("arch", MACHINE_CODE)
def test_kernels_fit_the_gpu(kernels, portable, arch):
    for name in portable:
        kernel = kernels[arch][name]
        base = base_of(name)
        registers = 2 * REGISTERS if base in SMALL_BLOCKS else REGISTERS
        stack = CALLS_STACK_BYTES if base in FINISHERS else STACK_BYTES
        if base in QUANTIZED and "e4m3" in name:
            stack = QUANTIZED_STACK_BYTES
        assert kernel.registers <= registers, (name, kernel)
        assert kernel.shared <= SHARED_BYTES, (name, kernel)
        assert kernel.local == 0 and kernel.stack <= stack, (name, kernel)


def test_bounds_are_of_kernels_that_exist(portable):
    bases = {base_of(name) for name in portable}
    assert bases >= SMALL_BLOCKS | FINISHERS | portable_kernels.WIDE_BASES


def test_hopper_kernels_take_no_more_than_they_did(kernels, portable):
    """Static shared memory is in the launches' static asserts: what a block may have less its
    dynamic part."""
    found = {name: kernels[HOPPER][name] for name in set(kernels[HOPPER]) - portable}
    unused = set(LIMITS) - {pattern_of(name) for name in found}
    assert not unused, f"no kernel comes under {unused}"
    for name, kernel in found.items():
        pattern = pattern_of(name)
        assert pattern, f"{name} has no limits: {kernel}"
        registers, stack = LIMITS[pattern]
        assert kernel.registers <= registers and kernel.stack <= stack and kernel.local == 0, (
            name,
            kernel,
            pattern,
        )


def test_registers_come_back_after_a_barrier(library):
    """MLA's producer (with an FP8 cache the scorer too) gives registers to two warpgroups and takes
    them back once they have them, not before; and PTX wants a warpgroup to meet between two
    exchanges."""
    found = gpu_objects.cuda_operations(library, "mla_decode_wgmma_h64_kernel")
    assert len(found) == 3
    for name, operations in found.items():
        fp8 = "ELb1E" in name
        back = f"BAR.SYNC 0x4, {'0x200' if fp8 else '0x180'}"
        plain = [re.sub(r"\.DEFER_BLOCKING|\.CTAPOOL( UP\d,)?", "", op) for op in operations]
        taken = plain.index(f"USETMAXREG.TRY_ALLOC {'0xa0' if fp8 else '0xa8'}")
        assert plain[taken + 1] == back.replace("SYNC", "ARV"), plain
        assert plain[plain.index("USETMAXREG.DEALLOC 0x80") - 1] in (
            "BAR.SYNC 0x1, 0x80",
            "BAR.SYNC 0x2, 0x80",
        ), plain
        given = [
            i
            for i, op in enumerate(plain)
            if op == f"USETMAXREG.DEALLOC {'0x60' if fp8 else '0x30'}"
        ]
        assert len(given) == (2 if fp8 else 1), plain
        for i in given:
            assert plain[plain.index("USETMAXREG.TRY_ALLOC 0x80", i) - 1] == back, plain


class _MlaSizes(ctypes.Structure):
    """rk_mla_decode_sizes."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("tokens", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("max_pages", ctypes.c_int64),
        ("max_seqlen_q", ctypes.c_int64),
        ("any_split", ctypes.c_int64),
        ("kv_item_size", ctypes.c_int64),
    ]


def test_mla_asks_for_the_workspace_of_the_kernel_that_runs(library):
    """Rows of up to 163,840 tokens. Only `decode_split_fixed` has a tree for each row, and so needs
    more for longer ones."""
    cluster_h16 = 1_083_392
    swap_qk_h16 = 8_687_616
    wgmma_h64 = 34_741_248
    split_fixed_16 = 194_641_920  # 16 query rows of a tile
    split_fixed_32 = 389_283_840
    query = ctypes.CDLL(str(library)).rk_mla_decode_workspace_size
    for heads, batch, max_seqlen_q, any_split, item_size, expected in (
        (128, 32, 1, 1, 2, wgmma_h64),
        (128, 32, 1, 1, 1, wgmma_h64),
        (16, 32, 2, 1, 2, wgmma_h64),
        (16, 9, 1, 1, 2, swap_qk_h16),
        (16, 8, 1, 1, 2, cluster_h16),
        (8, 8, 2, 1, 2, cluster_h16),
        (16, 5, 2, 1, 2, wgmma_h64),
        (16, 4, 2, 1, 2, cluster_h16),
        (20, 4, 1, 1, 2, cluster_h16),
        (33, 1, 1, 1, 2, wgmma_h64),
        (16, 8, 2, 1, 1, wgmma_h64),
        (16, 16, 1, 1, 1, split_fixed_16),
        (16, 16, 1, 0, 2, split_fixed_16),
        (16, 32, 1, 1, 1, split_fixed_16),
        (128, 32, 1, 0, 2, split_fixed_32),
        (16, 32, 1, 0, 1, split_fixed_16),
        (128, 32, 1, 1, 0, wgmma_h64),
        (16, 32, 1, 1, 0, split_fixed_16),
    ):
        sizes = _MlaSizes(
            struct_size=ctypes.sizeof(_MlaSizes),
            tokens=max(64, batch),
            batch=batch,
            heads=heads,
            page_size=64,
            max_pages=2560,
            max_seqlen_q=max_seqlen_q,
            any_split=any_split,
            kv_item_size=item_size,
        )
        found = ctypes.c_int64(-1)
        assert query(ctypes.byref(sizes), ctypes.byref(found)) == 0
        assert found.value == expected, (heads, batch, max_seqlen_q, any_split, item_size)


def test_nothing_of_cuda_is_linked(library):
    dynamic = subprocess.run(
        ["readelf", "-W", "-d", "--dyn-syms", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not re.search(r"NEEDED.*(cuda|cudart|nvidia|torch|c10)", dynamic)
    symbols = re.findall(r"UND (\S+)", dynamic)
    assert not [name for name in symbols if re.match(r"cu[A-Z]|cuda|__cuda", name)]


def test_import_without_a_gpu(library):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    facts = gpu_objects.importable(library.parents[2])
    assert facts.startswith("cuda|no device|[]|\n")
    assert "'impl': 'cuda:no device'" in facts
