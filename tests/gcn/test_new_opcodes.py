"""What the executor makes of gfx950's code, whose new instructions LLVM 19 does not know."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

from tests.child import IMPORT_PATH
from tests.gcn import assembly, library
from tests.gcn.marks import needs_executor

pytestmark = needs_executor


def vop3(opcode: int, to: int, *sources: int, neg: int = 0, abs: int = 0, omod: int = 0) -> str:
    """Two words of the encoding VOP3: sources are numbers of vector registers."""
    first = 0xD000_0000 | opcode << 16 | abs << 8 | to
    second = neg << 29 | omod << 27
    for i, source in enumerate(sources):
        second |= (256 + source) << (9 * i)
    return f".long {first:#x}\n .long {second:#x}\n"


CVT_PK_F16 = 0x267
BODY = (
    vop3(CVT_PK_F16, 10, 1, 2)
    + vop3(CVT_PK_F16, 11, 2, 1, neg=1, abs=2)
    + "v_mov_b32_e32 v12, v10\n"
    + vop3(CVT_PK_F16, 13, 12, 12)
)


def logic(opcode: int, to: int, table: int) -> str:
    """Three-input logic of v1, v2 and v1."""
    return vop3(opcode, to, 1, 2, 1, neg=table & 7, abs=table >> 3 & 7, omod=table >> 6)


# v_bitop3_b32 v10, v1, v2, v1 and v_bitop3_b16 v11, v1, v2, v1: the words of LLVM 21's assembler.
ASSEMBLED = {
    (0x234, 10, 0x07): (0xD234_000A, 0xE406_0501),
    (0x234, 10, 0x6C): (0xD234_050A, 0x8C06_0501),
    (0x233, 11, 0x0C): (0xD233_010B, 0x8406_0501),
}


@pytest.mark.parametrize("instruction", ASSEMBLED, ids=str)
def test_where_the_table_lies(instruction: tuple[int, int, int]) -> None:
    first, second = ASSEMBLED[instruction]
    assert logic(*instruction) == f".long {first:#x}\n .long {second:#x}\n"


def by_table(table: int, *words: np.ndarray) -> np.ndarray:
    out = np.zeros_like(words[0])
    for bit in range(32):
        a, b, c = ((x >> bit & 1).astype(np.uint32) for x in words)
        out |= (table >> (4 * a + 2 * b + c) & 1).astype(np.uint32) << bit
    return out


def halves(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        words = [x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (low, high)]
    return words[0] | words[1] << 16


def conversions() -> None:
    """In a process whose GPU is a gfx950. The code is assembled for gfx942, which has all of its
    other instructions, and says that it is gfx950's."""
    rng = np.random.default_rng(5)
    a, b = (rng.normal(size=64).astype(np.float32) * 2.0 ** rng.integers(-26, 18, 64) for _ in "ab")
    a, b = a.astype(np.float32), b.astype(np.float32)
    found = assembly.lanes(BODY, a.view(np.uint32), b.view(np.uint32), results=3)
    assert np.array_equal(found[0], halves(a, b))
    assert np.array_equal(found[1], halves(-b, np.abs(a)))
    assert np.array_equal(found[2], found[0])
    x, y = (rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in "xy")
    for table in (0x1B, 0xE4, 0xD8, 0x07, 0x6C):
        text = "v_mov_b32_e32 v11, 0\n" + logic(0x234, 10, table) + logic(0x233, 11, table)
        found = assembly.lanes(text, x, y, results=2)
        assert np.array_equal(found[0], by_table(table, x, y, x)), hex(table)
        assert np.array_equal(found[1], found[0] & 0xFFFF), hex(table)
    # OCP's format: NaN is 0x7f, -0 has a code, 448 is the largest.
    values = np.resize(np.array([1.0, -0.0, 448.0, np.nan, 1e9], np.float32), 64)
    text = "v_mov_b32_e32 v10, 0\n v_cvt_pk_fp8_f32 v10, v1, v1"
    codes = assembly.lanes(text, values.view(np.uint32))[0] & 255
    assert codes[:5].tolist() == [0x38, 0x80, 0x7E, 0x7F, 0x7F]
    print("as expected")


def test_new_conversions():
    assembly.compiler()  # skips here, not in the other process
    code = "from tests.gcn.test_new_opcodes import conversions; conversions()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**library.environment(GCN_TARGET="gfx950"), "PYTHONPATH": IMPORT_PATH},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "as expected\n", done.stderr


def test_the_listing_of_a_code_object():
    """Read in a process whose GPU is another."""
    text = library.disassembly(assembly.assemble(BODY, target="gfx950"))
    found = re.findall(r"\t(v_cvt_pk_f16_f32 .*?) //", text)
    assert [line.split(" ", 1)[1] for line in found] == [
        "v10, v1, v2", "v11, -v2, |v1|", "v13, v12, v12",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no code object"):
        library.disassembly(b"\0" * 4096)
