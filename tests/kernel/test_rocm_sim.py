"""What only the executor of AMD's machine code can show (`--device rocm-sim`): faults planted in
the library's code are caught, its collectives agree between processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import radix_kernels
from radix_kernels import _dispatch
from tests.child import IMPORT_PATH
from tests.gcn import library
from tests.gcn.mutants import Code, Mutant
from tests.kernel import rocm_cases

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def _on_the_executor(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") != "rocm-sim":
        pytest.skip("of --device rocm-sim")


@pytest.mark.parametrize("world", [2, 4, 8])
def test_collectives_between_processes(world):
    """Every rank is a process with a GPU of its own: handles, staging memory and flags as on real
    ones."""
    env = library.environment(GCN_DEVICES=str(world), PYTHONPATH=IMPORT_PATH)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.gcn.collectives",
                    str(rank),
                    str(world),
                    f"{folder}/g",
                ],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        said = [process.communicate(timeout=550)[0] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), said
    assert said == ["24 sums, 6 gathered or scattered, 6 norms, 2 replays\n"] * world


SUM = Mutant(r"v_add_f32_e32 (.*)", r"v_sub_f32_e32 \1")
SQUARE = Mutant(r"v_fmac_f32_e32 (v\d+), (v\d+, v\d+)", r"v_add_f32_e32 \1, \2")
# Not of a number and itself, which quiets a NaN.
LARGEST = Mutant(r"v_max_f32_e32 (v\d+, (v\d+), (?!\2$).*)", r"v_min_f32_e32 \1")
EXPONENTIAL = Mutant(r"v_exp_f32_e32 (.*)", r"v_log_f32_e32 \1")
NEIGHBOUR = Mutant(r"(.*_dpp .*)quad_perm:\[1,0,3,2\](.*)", r"\1quad_perm:[0,1,2,3]\2")
LANE = Mutant(r"v_readlane_b32 (s\d+), (v\d+), 48", r"v_readlane_b32 \1, \2, 16")
ROUNDING = Mutant(r"v_cvt_pk_fp8_f32 (v\d+), (v\d+), (v\d+)", r"v_cvt_pk_fp8_f32 \1, \3, \2")
CLAMP = Mutant(r"v_med3_f32 (v\d+), (v\d+), .*", r"v_mov_b32_e32 \1, 0")
BARRIER = Mutant("s_barrier")
PARTIAL = Mutant(r"ds_write_b32 (v\d+, v\d+).*")
LOADED = Mutant(r"s_waitcnt vmcnt\(0\).*")
LOADED_LATER = Mutant(r"s_waitcnt vmcnt\(0\).*", nth=1)
ARGUMENTS = Mutant(r"s_waitcnt lgkmcnt\(0\)")
LOAD = Mutant(r"(global_load_dwordx4 v\[\d+:\d+\], v\[\d+:\d+\], off)", r"\1 offset:16")
STORE = Mutant(r"(global_store_\w+ v\[\d+:\d+\], v\[\d+:\d+\], off)", r"\1 offset:16")
STORE_WORD = Mutant(r"(global_store_\w+ v\[\d+:\d+\], v\d+, off)", r"\1 offset:4")
STORE_FROM_BASE = Mutant(r"(global_store_\w+ v\d+, v\d+, s\[\d+:\d+\])", r"\1 offset:4")
BOUND = Mutant(r"v_cmp_le_u32_e32 (.*)", r"v_cmp_gt_u32_e32 \1")
LANES = Mutant(r"s_and_saveexec_b64 (s\[\d+:\d+\]), (\S+)", r"s_or_saveexec_b64 \1, \2")
STRIDE = Mutant(r"v_lshlrev_b32_e32 (v\d+), 4, (.*)", r"v_lshlrev_b32_e32 \1, 5, \2")
ROW = Mutant(r"s_mul_i32 (.*)", r"s_add_u32 \1")

# Of each family faults that its case runs into: in the arithmetic, an order, a wait, a bound.
PLANTED = {
    "rmsnorm": (
        BARRIER,
        LOADED,
        ARGUMENTS,
        SUM,
        SQUARE,
        STORE,
        LOAD,
        NEIGHBOUR,
        LANE,
        STRIDE,
        PARTIAL,
    ),
    "rope": (LOADED_LATER, ARGUMENTS, STORE, LOAD, ROW),
    "silu_and_mul": (LOADED, ARGUMENTS, BOUND, EXPONENTIAL, LANES),
    "store_kv_cache": (LOADED, LOADED_LATER, STORE, LOAD, ROW),
    "per_token_quant": (BARRIER, LOADED, STORE_FROM_BASE, NEIGHBOUR, LARGEST, PARTIAL, LANES),
    "topk_softmax": (LOADED_LATER, ARGUMENTS, SUM, STORE_WORD, LOAD, NEIGHBOUR, EXPONENTIAL),
    "merge_state": (LOADED, ARGUMENTS, EXPONENTIAL, STORE, LOAD),
    "store_mla_kv": (LOADED_LATER, ARGUMENTS, STORE, LOAD),
    "gather_mla_kv": (LOADED_LATER, ARGUMENTS, STORE),
}
# On chips that round to FP8 by an instruction.
PLANTED_IN_FP8 = {"per_token_quant": (ROUNDING, CLAMP)}


@pytest.fixture(scope="module")
def code() -> Code:
    folder = Path(radix_kernels.__file__).parent
    return Code(folder / "lib/libradix_kernels.so", _dispatch.isa())


def kernels_of(case: str) -> list[str]:
    """The kernels that a case runs, with which it passes."""
    before = library.report()["kernels"]
    rocm_cases.CASES[case]()
    after = library.report()["kernels"]
    return [name for name, count in after.items() if count != before.get(name)]


@pytest.mark.parametrize("case", rocm_cases.CASES)
def test_cases_pass(case):
    assert kernels_of(case)


@pytest.mark.parametrize("case", PLANTED)
def test_planted_faults_are_caught(case, code):
    (kernel,) = kernels_of(case)
    faults = PLANTED[case]
    if _dispatch.isa() != "gfx90a":
        faults += PLANTED_IN_FP8.get(case, ())
    for mutant in faults:
        with code.planted(kernel, mutant) as line, pytest.raises((AssertionError, RuntimeError)):
            rocm_cases.CASES[case]()
            pytest.fail(f"not caught: {line!r} became {mutant.put!r}", pytrace=False)
    assert kernels_of(case) == [kernel]
