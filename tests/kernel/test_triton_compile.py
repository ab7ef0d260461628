"""Every Triton kernel compiles for the chips that we ship to, and fits them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.child import IMPORT_PATH
from tests.kernel.triton_device import need_triton, triton_module

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"gfx942": 65536, "gfx950": 65536, "sm_90": 232448}  # bytes of shared memory

need_triton()

pytestmark = [
    pytest.mark.builds(),
    pytest.mark.timeout(900),  # 40 s of CPU for the first of each module
]


# All targets in one process: torch and Triton take longer to load than a kernel to compile.
@functools.lru_cache
def _compiled(module: str, *targets: str) -> list[dict]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = IMPORT_PATH
    result = subprocess.run(
        [sys.executable, "-m", f"tests.kernel.{module}", *targets],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def compiled(target: str, module: str = "triton_aot") -> list[dict]:
    others = () if module == "triton_aot" else ("sm_89",)
    return [line for line in _compiled(module, *TARGETS, *others) if line["target"] == target]


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_and_fits(target):
    lines = compiled(target)
    assert len(lines) == 22
    for line in lines:
        assert line["shared"] <= TARGETS[target], line
        wants_matrix_unit = line["kernel"].startswith("attend") and "fp32" not in line["kernel"]
        assert line["mma"] > 0 or not wants_matrix_unit, line


@pytest.mark.parametrize("target", [*TARGETS, "sm_89"])
def test_experts_compile_and_fit(target):
    lines = compiled(target, "triton_aot_moe")
    assert len(lines) == {"gfx942": 38, "gfx950": 33, "sm_90": 35, "sm_89": 40}[target]
    for line in lines:
        assert line["shared"] <= (TARGETS | {"sm_89": 101376})[target], line
        assert line["mma"] > 0 or "fp32" in line["kernel"] or "combine" in line["kernel"], line


def test_codes_compile_and_fit():
    """Without spills on gfx, and on the matrix unit, also for the chips that have no native
    kernel."""
    limits = TARGETS | {"sm_80": 166912}
    lines = _compiled("triton_aot_codes", *limits)
    assert len(lines) == 18 * len(limits)
    for line in lines:
        assert line["shared"] <= limits[line["target"]], line
        assert line["mma"] > 0 or "fp32" in line["kernel"], line
        for key in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            assert line.get(key, 0) == 0, line
        assert line.get("vgpr_count", 0) <= 512, line


def test_mla_compiles_and_fits():
    """On gfx without spills; no number makes a compilation of its own."""
    lines = _compiled("triton_aot_mla", "gfx942", "gfx950", "sm_89")
    assert len(lines) == 9
    for line in lines:
        assert (
            line["shared"] <= (TARGETS | {"sm_89": 101376})[line["target"]]
            and not line["specialised"]
        ), line
        if line["kernel"].startswith("attend"):
            assert line["mma"] > 0 and line.get("wide_loads", 8) >= 8, line
        for key in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            assert line.get(key, 0) == 0, line
        assert line.get("vgpr_count", 0) <= 512, line


@pytest.mark.parametrize("target", [*TARGETS, "sm_89"])
def test_the_draw_compiles_and_fits(target):
    (line,) = compiled(target, "triton_aot_sampling")
    assert line["shared"] <= 16384, line  # many programs a multiprocessor


@pytest.mark.parametrize(("target", "depth"), [("gfx942", 8), ("gfx950", 16)])
@pytest.mark.parametrize(
    ("name", "dim", "group"),
    [("attend bf16 d128 prefill", 128, 8), ("attend fp16 d64 prefill", 64, 2)],
)
def test_prompts_multiply_nothing_twice(target, depth, name, dim, group):
    """The waves of a block share its products of 32 x 32 x depth, and two waves fit the registers
    of a SIMD."""
    (line,) = [line for line in compiled(target) if line["kernel"] == name]
    tiles = triton_module("attention").choose_tiles(dim, group, 2, decode=False, amd=True)
    products = 2 * dim * tiles.block_m * tiles.block_n // (32 * 32 * depth)
    assert line["loop_mma"] == products // tiles.num_warps, line
    assert line["vgpr_count"] <= 256, line


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("gfx")])
def test_no_spills_and_wide_loads(target):
    for line in (
        compiled(target)
        + compiled(target, "triton_aot_moe")
        + compiled(target, "triton_aot_sampling")
    ):
        if "ones" in line["kernel"]:  # no layout that occurs: that it compiles is the test
            continue
        for key in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            assert line[key] == 0, line
        assert line["vgpr_count"] <= 512, line
        if line["kernel"].startswith("attend"):
            assert line["wide_loads"] >= 8, line
        if line["kernel"].startswith(("product", "scaled_product", "int8_product")):
            assert line["wide_loads"] >= 3, line
        if line["kernel"].startswith("draw"):
            assert line["paired_loads"] >= 5, line  # 512 lanes on a block of 1,024 ids
