"""The plan of quantized weights on Hopper: host code, compiled and asked."""

from __future__ import annotations

import shutil
import subprocess
from typing import NamedTuple

import pytest

from tests.kernel.gpu_objects import ROOT

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler"),
]
SHAPES = [(28672, 4096), (6144, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (2880, 2880)]
NIBBLES = (1, 2048)  # groups of 128 or whole rows; bytes of 64 x 64 codes
FORMS = [NIBBLES, (0, 2048), (1, 4096)]
H200 = 132


class Plan(NamedTuple):
    wgmma: int
    rows: int
    tokens: int
    k_parts: int
    row_blocks: int
    k_shares: int
    blocks: int  # that run at once


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    program = tmp_path_factory.mktemp("plan") / "plan"
    source = ROOT / "tests/kernel/mixed_plan.cpp"
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT / 'kernel/csrc'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)

    def ask(shape, tokens, form=NIBBLES, halves=0, multiprocessors=H200):
        lines = [(*shape, halves, *form, multiprocessors, count) for count in tokens]
        text = "\n".join(" ".join(map(str, line)) for line in lines)
        done = subprocess.run(
            [program], input=text, capture_output=True, text=True, check=True, timeout=60
        )
        return [Plan._make(map(int, line.split())) for line in done.stdout.splitlines()]

    return ask


@pytest.mark.parametrize("halves", [0, 1])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 2), (40, 100000), (200000, 64)], ids=str)
def test_what_shares_k_is_alike_within_a_class(plans, shape, form, halves):
    for first, last in ((17, 32), (17, 64), (65, 128), (129, 1024)):
        found = plans(shape, range(first, last + 1), form, halves)
        assert len(found) == last - first + 1
        assert len({(plan.k_parts, plan.k_shares) for plan in found}) == 1
        if last == 32:
            assert len({plan.wgmma for plan in found}) == 1


@pytest.mark.parametrize("multiprocessors", [1, 78, 114, 132])
def test_plans_are_within_what_the_kernel_takes(plans, multiprocessors):
    for shape in SHAPES:
        for plan in plans(shape, (1, 16, 17, 33, 65, 129, 512), multiprocessors=multiprocessors):
            assert plan.row_blocks in (1, 2)
            assert plan.k_shares in (1, 2, 4, 8)
            assert plan.row_blocks * plan.k_shares <= 8


def test_who_multiplies(plans):
    """Wide weights, and long k, are multiplied by mixed_wgmma from 17 tokens on."""
    for shape in ((28672, 4096), (4096, 14336)):
        found = plans(shape, (1, 16, 17, 32, 33))
        assert [plan.wgmma for plan in found] == [0, 0, 1, 1, 1]
    for shape in ((6144, 4096), (4096, 4096)):
        assert [plan.wgmma for plan in plans(shape, (16, 17, 32, 33))] == [0, 0, 0, 1]


def test_clusters_that_do_not_fit_at_once_are_not_chosen(plans):
    """Few tiles run in one round of the clusters that an H200 holds."""
    for shape in SHAPES[1:]:
        for tokens, plan in zip((64, 128, 256), plans(shape, (64, 128, 256)), strict=True):
            tiles = -(-shape[0] // plan.rows) * -(-tokens // plan.tokens)
            clusters = -(-tiles // plan.row_blocks)
            assert clusters * plan.row_blocks * plan.k_shares <= plan.blocks, (shape, tokens, plan)
