"""The ROCm wheel, built here: what code it holds for each GPU, and that it imports without HIP.

No AMD GPU runs these tests: they say that every kernel is there for each target and fits it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import child
from tests.gcn import assembly
from tests.gcn import library as stand_in
from tests.gcn.marks import needs_executor
from tests.kernel import gpu_objects, gpu_wheels, portable_kernels
from tests.kernel.gpu_objects import AmdKernel
from tests.kernel.portable_kernels import (
    FINISHERS,
    PACK,
    REDUCERS,
    WIDE_BASES,
    base_of,
    moves_16_bytes,
    reduces,
    rounds_to_fp8,
)

# The first test may wait for the compiler.
pytestmark = [
    pytest.mark.builds("rocm"),
    pytest.mark.timeout(4800),
]

TARGETS = ("gfx90a", "gfx942", "gfx950")
HAS_FP8 = ("gfx942", "gfx950")
# LLVM's division of 64-bit integers multiplies by it, 2^64 less a little; nothing else does.
WIDE_DIVISION = "0x5f7ffffc"
LDS_BYTES = 65536
FINISHER_SCRATCH_BYTES = 704  # a lane: their state for flat rows, which other kernels do not have
CODE_OBJECT_V5 = 3  # as the ELF header counts
# The flags of the ELF header: EF_AMDGPU_MACH, and the settings of xnack and sramecc. Of "any" the
# object runs on every GPU of the target.
MACHINE = 0x0FF
SETTINGS = 0xF00
ANY_SETTINGS = 0x500
# A call that was not inlined, memory through the generic path, scratch, a trap.
UNWANTED = re.compile(r"s_swappc|s_setpc|flat_|scratch_|s_trap|buffer_.*off")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return gpu_wheels.library("rocm", tmp_path_factory.mktemp("rocm"))


@pytest.fixture(scope="module")
def kernels(library) -> dict[str, dict[str, AmdKernel]]:
    """gfx target -> every kernel in the library."""
    objects = gpu_objects.amd_objects(library)
    assert set(objects) == set(TARGETS)
    for target, parts in objects.items():
        for part in parts:
            assert part.abi_version == CODE_OBJECT_V5
            assert part.flags & MACHINE == assembly.MACHINES[target]
            assert part.flags & SETTINGS == ANY_SETTINGS
    return {t: {n: k for p in parts for n, k in p.kernels.items()} for t, parts in objects.items()}


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_there(kernels, target):
    found = set(kernels[target])
    assert {base_of(name) for name in found} == portable_kernels.declared()
    assert not portable_kernels.missing_types(found)
    assert found == set(kernels[TARGETS[0]])


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit_the_gpu(kernels, target):
    for name, kernel in kernels[target].items():
        facts = kernel.facts
        assert facts["wavefront_size"] == 64, name
        # Scalars may spill (addresses, a row's settings): into lanes of vector registers, no memory
        # is involved.
        assert facts["vgpr_spill_count"] == 0, name
        scratch = FINISHER_SCRATCH_BYTES if base_of(name) in FINISHERS else 0
        assert facts["private_segment_fixed_size"] <= scratch, (
            name,
            facts["private_segment_fixed_size"],
        )
        assert facts["dynamic_stack"] == 0, name
        assert facts["group_segment_fixed_size"] <= LDS_BYTES, name
        # 1,024 threads are 16 waves on 4 SIMDs: 4 waves each must fit into 512 registers a lane.
        waves = facts["max_flat_workgroup_size"] / 64 / 4
        assert facts["vgpr_count"] * max(waves, 1) <= 512, name


@pytest.mark.parametrize("target", TARGETS)
def test_instructions(kernels, target):
    wide = {name for name in kernels[target] if moves_16_bytes(name)}
    assert {base_of(name) for name in wide} == WIDE_BASES
    assert all(any(dtype in name for name in wide) for dtype in PACK)
    for name, kernel in kernels[target].items():
        seen = kernel.instructions
        assert sum(seen.values()) > (4 if name == "zero_kernel" else 40), f"{name} is empty"
        unwanted = [op for op in seen if UNWANTED.match(op)]
        assert base_of(name) in FINISHERS or not unwanted, (name, unwanted)
        loads = seen["global_load_dwordx4"]
        stores = seen["global_store_dwordx4"]
        assert name not in wide or (loads >= 1 and stores >= 1), name


@pytest.mark.parametrize("target", TARGETS)
def test_no_division_of_64_bits(kernels, target):
    divided = [n for n, kernel in kernels[target].items() if WIDE_DIVISION in kernel.literals]
    assert not divided


@pytest.mark.parametrize("target", TARGETS)
def test_reductions_go_through_registers(kernels, target):
    found = {name: k for name, k in kernels[target].items() if reduces(name)}
    assert {base_of(name) for name in found} == REDUCERS
    for name, kernel in found.items():
        assert any(op.endswith("_dpp") for op in kernel.instructions), name


@pytest.mark.parametrize("target", TARGETS)
def test_fp8_is_rounded_by_the_instruction(kernels, target):
    found = {name: k for name, k in kernels[target].items() if rounds_to_fp8(name)}
    assert len({base_of(name) for name in found}) == 7
    for name, kernel in found.items():
        assert bool(kernel.instructions["v_cvt_pk_fp8_f32"]) == (target in HAS_FP8), name


@pytest.mark.parametrize("target", TARGETS)
def test_lds_is_not_accessed_by_halves(kernels, target):
    half = re.compile(r"ds_(read|write)\w*_[bui]16")
    found = [
        n for n, kernel in kernels[target].items() if any(map(half.match, kernel.instructions))
    ]
    assert not found


def test_nothing_of_hip_is_linked(library):
    dynamic = subprocess.run(
        ["readelf", "-W", "-d", "--dyn-syms", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not re.search(r"NEEDED.*(hip|hsa|rocm|amd)", dynamic)
    symbols = re.findall(r"UND (\S+)", dynamic)
    assert not [name for name in symbols if "hip" in name.lower()]


def test_sonames_of_rocm_6_to_10(library):
    """What the library looks for: HIP 6's and 7's, which is ROCm 10's too."""
    sonames = set(re.findall(rb"libamdhip64\.so\.\d+", library.read_bytes()))
    assert sonames == {b"libamdhip64.so.6", b"libamdhip64.so.7"}


def test_import_without_hip(library, monkeypatch):
    monkeypatch.setenv("RADIX_LIBHIP", "/nowhere/libamdhip64.so.7")
    facts = gpu_objects.importable(library.parents[2])
    assert facts.startswith("rocm|no HIP runtime|[]|\n")
    assert "'impl': 'rocm:no HIP runtime'" in facts


_BEGIN = """
import torch, radix_kernels as rk
from tests.gcn import library, arrays
x = torch.randn(5, 128).bfloat16()
def call(device=0):
    y = rk.silu_and_mul(arrays.Array(x, device), out=arrays.Array(out, device))
    arrays.close_memory()
out = torch.zeros(5, 64).bfloat16()
"""


def on_stand_in(library: Path, code: str, **settings: str) -> list[str]:
    """The lines that the code prints, in a process with the wheel and the stand-in of HIP."""
    path = os.pathsep.join([str(library.parents[2]), str(gpu_objects.ROOT), child.IMPORT_PATH])
    env = stand_in.environment(PYTHONPATH=path, **settings)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=gpu_objects.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_executor
def test_launches_reach_the_runtime(library):
    """The kernels registered at load are known to a HIP runtime opened later; launches go to the
    tensors' GPU, and their own status comes back."""
    code = f"""{_BEGIN}
call(device=1)
print(library.report()["last"])
print(torch.equal(out, rk.reference.silu_and_mul(x)))
arrays._open_memory = lambda x: None
try:
    call(device=1)
except RuntimeError as error:
    print(error)
"""
    last, equal, error = on_stand_in(library, code, GCN_DEVICES="2", GCN_TARGET="gfx942")
    name, grid, block, device, stream = last.split("|")
    assert gpu_objects.short_names([name]) == ["gated_even_kernel<Silu, bf16>"]
    assert (grid, block, device, stream) == ("1,1,1", "256,1,1", "1", "0")
    assert equal == "True"
    assert error.startswith("silu_and_mul: unspecified launch failure: memory access outside")


_FACTS = """
import radix_kernels as rk
facts = rk.capabilities()
print(facts["isa"], facts["ops"]["rmsnorm"]["bfloat16"], sep="|")
"""


@needs_executor
def test_no_gpu_is_not_no_hip(library):
    (facts,) = on_stand_in(library, _FACTS, GCN_DEVICES="0")
    assert facts.startswith("no device|")


@needs_executor
def test_a_chip_without_code_gets_no_native_kernel(library):
    (facts,) = on_stand_in(library, _FACTS, GCN_TARGET="gfx942")
    assert facts == "gfx942|{'impl': 'rocm:gfx942', 'why': 'native kernel'}"
    (facts,) = on_stand_in(library, _FACTS, GCN_TARGET="gfx1100")
    assert facts.startswith("gfx1100|{'impl': 'reference'")
    assert "the rocm library has code for gfx" in facts and "this GPU is gfx1100" in facts


def test_triton_serves_attention_on_amd():
    """The wheel's attention on AMD is Triton's; test_triton_compile builds it for the chips."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from tests.kernel.test_triton_compile import TARGETS as compiled

    assert {"gfx942", "gfx950"} <= set(compiled)
    from radix_kernels import _dispatch

    assert _dispatch.describe("flash_attn_with_kvcache", "rocm")[0] == "triton"
