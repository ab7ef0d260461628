"""What gfx950 has beyond gfx942, buffer accesses, and the listing that stands for a disassembly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gcn.assembly import LANES, Refused, lanes, run
from tests.gcn.listing import listing
from tests.gcn.marks import needs_executor

pytestmark = needs_executor

LANE = np.arange(LANES)
U32 = np.uint32


@pytest.mark.parametrize("table", [0x36, 0x80, 0x01, 0xCA, 0xFF])
def test_logic_of_three(table):
    rng = np.random.default_rng(table)
    a, b, c = (rng.integers(0, 1 << 32, LANES).astype(U32) for _ in range(3))
    got = lanes(f"v_bitop3_b32 v10, v1, v2, v3 bitop3:{table:#x}", a, b, c, assembled=False)[0]
    bits = [[x >> U32(i) & U32(1) for i in range(32)] for x in (a, b, c)]
    for i in range(32):
        index = 4 * bits[0][i] + 2 * bits[1][i] + bits[2][i]
        assert np.array_equal(got >> U32(i) & U32(1), U32(table) >> index & U32(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conversion_of_a_pair(dtype):
    """As torch rounds; ties, subnormal numbers, what is too large."""
    special = torch.tensor([1.00390625, 1.01171875, -65520.0, 3.4e38, 1e-40, -6e-8, 0.0, -0.0])
    x = torch.cat([special, torch.randn(LANES - 8, generator=torch.Generator().manual_seed(1))])
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    words = x.numpy().view(U32), x.flip(0).contiguous().numpy().view(U32)
    got = lanes(f"v_cvt_pk_{name}_f32 v10, v1, v2", *words, assembled=False)[0]
    halves = torch.stack([x, x.flip(0)], 1).to(dtype).view(torch.int16).numpy().view(U32)[:, 0]
    assert np.array_equal(got, halves)


@pytest.mark.parametrize("upper", [0, 1])
def test_pairs_of_fp8_become_bf16(upper):
    """Every code, times a power of two."""
    codes = torch.arange(256, dtype=torch.uint8)
    words = codes.numpy().view(U32)
    text = f"v_cvt_scalef32_pk_bf16_fp8 v10, v1, 4.0 op_sel:[{upper},0,0]"
    got = lanes(text, words, assembled=False)[0]
    numbers = (codes.view(torch.float8_e4m3fn).float() * 4).bfloat16().view(LANES, 2, 2)
    found = torch.from_numpy(got.copy().view(np.int16)).view(torch.bfloat16).view(LANES, 2)
    assert torch.equal(found.nan_to_num(7), numbers[:, upper].nan_to_num(7))


def test_logic_of_three_halves():
    text = "v_mov_b32 v10, v1\n v_bitop3_b16 v10, v1, v2, v3 bitop3:0xfe"
    got = lanes(text, LANE + 0x50000, LANE * 3, LANE * 5, assembled=False)[0]
    assert np.array_equal(got, 0x50000 | LANE | LANE * 3 | LANE * 5)


@pytest.mark.parametrize("step", [16, 32])
def test_rows_change_places(step):
    text = f"v_permlane{step}_swap_b32_e32 v1, v2\n v_mov_b32 v10, v1\n v_mov_b32 v11, v2"
    got = lanes(text, LANE, LANE + 100, results=2, assembled=False)
    upper = (LANE & step) != 0
    assert np.array_equal(got[0], np.where(upper, LANE - step + 100, LANE))
    assert np.array_equal(got[1], np.where(upper, LANE + 100, LANE + step))


@pytest.mark.parametrize("bits", [16, 8])
def test_transposed_reads(bits):
    """Sixteen lanes read rows of 16 elements that lie side by side, and get a column each."""
    dtype = np.uint16 if bits == 16 else np.uint8
    stored = np.random.default_rng(bits).integers(0, 1 << bits, 64 * 64 // bits).astype(dtype)
    words = stored.view(U32)
    text = f"""
  v_lshlrev_b32_e32 v5, 3, v0
  ds_write_b64 v5, v[1:2]
  s_waitcnt lgkmcnt(0)
  ds_read_b64_tr_b{bits} v[10:11], v5
  s_waitcnt lgkmcnt(0)"""
    got = lanes(text, words[0::2], words[1::2], results=2, lds=512, assembled=False)
    found = np.stack(got, 1).copy().view(dtype)  # [lane, element]
    for group in range(4):
        tile = stored.reshape(4, -1)[group].reshape(-1, 16)
        assert np.array_equal(found[16 * group : 16 * group + 16], tile.T)


BUFFER = """
  s_mov_b64 s[8:9], s[6:7]
  s_mov_b32 s10, {bytes}
  s_mov_b32 s11, 0x27000
"""


def test_buffer_loads_give_zero_past_the_end():
    given = np.arange(1, LANES + 1, dtype=U32)
    text = f"""{BUFFER.format(bytes=160)}
  s_mov_b32 s12, 8
  buffer_load_dword v10, v63, s[8:11], 0 offen
  buffer_load_dword v11, v63, s[8:11], s12 offen offset:4
  buffer_load_ushort v12, v63, s[8:11], 0 offen offset:2
  buffer_load_dword v13, off, s[8:11], 0 offset:12
  v_add_u32_e32 v2, -16, v63
  buffer_load_dword v14, v2, s[8:11], 0 offen offset:16
  s_waitcnt vmcnt(0)"""
    stores = "".join(
        f"\n global_store_dword v63, v{10 + i}, s[4:5] offset:{4 * LANES * i}" for i in range(5)
    )
    got = run(text + stores, given, np.zeros((5, LANES), U32))
    assert np.array_equal(got[0], np.where(LANE < 40, LANE + 1, 0))
    assert np.array_equal(got[1], np.where(LANE + 3 < 40, LANE + 4, 0))
    assert np.array_equal(got[2], np.zeros(LANES))
    assert np.array_equal(got[3], np.full(LANES, 4))
    assert np.array_equal(got[4], got[0])  # the register is below 0 in the first lanes


def test_buffer_stores_past_the_end_are_dropped():
    out = np.full(LANES, 7, U32)
    text = f"""{BUFFER.format(bytes=160)}
  s_mov_b64 s[8:9], s[4:5]
  buffer_store_dword v0, v63, s[8:11], 0 offen"""
    assert np.array_equal(run(text, np.zeros(1, U32), out), np.where(LANE < 40, LANE, 7))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("buffer_load_dword v10, v63, s[8:11], 0 offen", "outside of every buffer"),
        ("s_or_b32 s9, s9, 0x40000\n buffer_load_dword v10, v63, s[8:11], 0 offen", "a stride"),
        ("buffer_load_dword v10, v63, s[8:11], 0 offen\n v_mov_b32 v11, v10", "before s_waitcnt"),
    ],
)
def test_refused_buffers(body, text):
    """A buffer that is larger than the memory behind it, one of structures, a result too early."""
    words = 16 if "outside" in text else LANES
    with pytest.raises(Refused, match=text):
        run(BUFFER.format(bytes=4096) + body, np.zeros(words, U32), np.zeros(LANES, U32))


def test_listing_counts_branches():
    text = "f:\n s_nop 0 ; a comment\n.L1:\n s_branch .L2\n s_nop 1\n.L2:\n s_cbranch_scc1 .L1\n"
    lines = listing(text + " s_endpgm\n .section .rodata\n .long 1\n", 0x100).splitlines()
    assert [line.split("//")[0].strip() for line in lines] == [
        "s_nop 0", "s_branch 1", "s_nop 1", f"s_cbranch_scc1 {65536 - 3}", "s_endpgm",
    ]  # fmt: skip
    assert [line.split("// ")[1][:12] for line in lines][-1] == f"{0x110:012X}"
    with pytest.raises(ValueError, match="addresses of code"):
        listing("f:\n s_getpc_b64 s[0:1]\n", 0)
