"""Every matrix instruction of the executor against a plain product, with the layouts of AMD's ISA
documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gcn.assembly import LANES, lanes
from tests.gcn.marks import needs_executor

pytestmark = needs_executor

LANE = np.arange(LANES)
FIRST = 20  # the first register of a result
DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i8": torch.int8,
    "fp8": torch.float8_e4m3fnuz,
    "bf8": torch.float8_e5m2fnuz,
}
# (rows and columns, K, dtypes of A and B, whether the assembler here knows it: of gfx942)
PRODUCTS = {
    "f32_32x32x2_f32": (32, 2, "f32", "f32", True),
    "f32_16x16x4_f32": (16, 4, "f32", "f32", True),
    "f32_32x32x8_f16": (32, 8, "f16", "f16", True),
    "f32_16x16x16_f16": (16, 16, "f16", "f16", True),
    "f32_32x32x8_bf16": (32, 8, "bf16", "bf16", True),
    "f32_16x16x16_bf16": (16, 16, "bf16", "bf16", True),
    "i32_32x32x16_i8": (32, 16, "i8", "i8", True),
    "i32_16x16x32_i8": (16, 32, "i8", "i8", True),
    **{
        f"f32_{n}x{n}x{k}_{a}_{b}": (n, k, a, b, True)
        for n, k in ((32, 16), (16, 32))
        for a in ("fp8", "bf8")
        for b in ("fp8", "bf8")
    },
    "f32_32x32x16_f16": (32, 16, "f16", "f16", False),
    "f32_16x16x32_f16": (16, 32, "f16", "f16", False),
    "f32_32x32x16_bf16": (32, 16, "bf16", "bf16", False),
    "f32_16x16x32_bf16": (16, 32, "bf16", "bf16", False),
    "i32_32x32x32_i8": (32, 32, "i8", "i8", False),
    "i32_16x16x64_i8": (16, 64, "i8", "i8", False),
    "f32_32x32x64_f8f6f4": (32, 64, "fp8", "fp8", False),
    "f32_16x16x128_f8f6f4": (16, 128, "fp8", "fp8", False),
}


def operand(matrix: torch.Tensor) -> list[np.ndarray]:
    """The registers of A: lane l holds row l % n and, of K, the part of group l // n. B likewise,
    transposed."""
    n, k = matrix.shape
    part = k // (LANES // n)
    of_lane = matrix[LANE % n].reshape(LANES, -1, part)[LANE, LANE // n].contiguous()
    return list(of_lane.view(torch.uint8).numpy().view(np.uint32).reshape(LANES, -1).T)


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name):
    n, k, a_type, b_type, assembled = PRODUCTS[name]
    generator = torch.Generator().manual_seed(n * k)
    a, b = (
        torch.randint(-6, 7, (n, k), generator=generator).to(DTYPES[dtype])
        for dtype in (a_type, b_type)
    )
    words = [*operand(a), *operand(b)]
    size = len(words) // 2
    results = n * n // LANES
    whole = a_type == "i8"
    # Register r of lane l begins as 4 l + r: as if C had that there.
    begin = "".join(
        f"  v_add_u32_e32 v{FIRST + r}, {r}, v63\n"
        + ("" if whole else f"  v_cvt_f32_u32_e32 v{FIRST + r}, v{FIRST + r}\n")
        for r in range(results)
    )
    registers = [f"v[2:{1 + size}]", f"v[{2 + size}:{1 + 2 * size}]"] if size > 1 else ["v2", "v3"]
    d = f"v[{FIRST}:{FIRST + results - 1}]"
    text = f"{begin}  v_mfma_{name} {d}, {', '.join(registers)}, {d}"
    got = lanes(
        text,
        LANE,
        *words,  # pairs of registers begin at even ones
        results=results,
        first=FIRST,
        assembled=assembled,
    )
    product = (a.double() @ b.double().T).numpy()
    for r in range(results):
        groups = LANES // n
        rows = 4 * groups * (r // 4) + 4 * (LANE // n) + r % 4
        expected = product[rows, LANE % n] + 4 * LANE + r
        found = got[r].view(np.int32) if whole else got[r].view(np.float32)
        assert np.array_equal(found, expected), f"register {r}"
