"""How Hopper's layout holds the codes of mxfp4: host code, compiled and asked."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from tests.kernel.code_weights import FLOAT4
from tests.kernel.gpu_objects import ROOT
from tests.kernel.helpers import integers

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler"),
]
PAIRS = 500


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    program = tmp_path_factory.mktemp("pair") / "pair"
    source = ROOT / "tests/kernel/e2m1_pair.cpp"
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command += [f"-I{ROOT / 'kernel/csrc'}", f"-I{ROOT / 'kernel/include'}"]
    subprocess.run([*command, str(source), "-o", str(program)], check=True, timeout=120)
    return program


def words_of(codes):
    """Codes [PAIRS, 2 steps, 4 registers, 2 halves] in nibbles: register j's in j and j + 4."""
    shifts = torch.arange(4)[:, None] * 4 + torch.arange(2) * 16
    return (codes << shifts).sum(dim=(2, 3))


@pytest.fixture
def answers(program, rng):
    codes = integers(0, 16, (PAIRS, 2, 4, 2), rng)
    codes[0] = 0
    codes[1] = 15
    words = words_of(codes)
    text = "\n".join(f"{first:x} {second:x}" for first, second in words.tolist())
    done = subprocess.run(
        [program], input=text, capture_output=True, text=True, check=True, timeout=60
    )
    found = [[int(word, 16) for word in line.split()] for line in done.stdout.splitlines()]
    assert len(found) == PAIRS
    return codes, words, torch.tensor(found)


def test_codes_come_back(answers):
    _codes, words, found = answers
    assert torch.equal(found[:, 2:4], words)


def test_two_words_hold_every_bit_of_sixteen_codes_once(answers):
    """No bit of the codes shares its place: there are as many ones as before."""
    _codes, words, found = answers
    for pair in range(PAIRS):
        stored = sum(int(word).bit_count() for word in found[pair, :2].tolist())
        assert stored == sum(int(word).bit_count() for word in words[pair].tolist())


def test_registers_are_the_values_of_their_codes(answers):
    """As bf16 but for 2^-126, by which the kernels multiply beside the scale."""
    codes, _words, found = answers
    registers = found[:, 4:].reshape(PAIRS, 2, 4)
    halves = torch.stack([registers & 0xFFFF, registers >> 16], dim=-1)
    numbers = (halves << 16).to(torch.int64)
    numbers = torch.where(numbers >= 1 << 31, numbers - (1 << 32), numbers).to(torch.int32)
    assert torch.equal(numbers.view(torch.float32).double() * 2.0**126, FLOAT4[codes])
