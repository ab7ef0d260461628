"""The executor itself: instructions against numpy, and programs that it must refuse."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gcn import assembly, library
from tests.gcn.assembly import LANES, Refused, lanes, run
from tests.gcn.marks import needs_executor

# The first test compiles the executor.
pytestmark = [
    pytest.mark.builds(),
    needs_executor,
]

LANE = np.arange(LANES)
U32 = np.uint32
U64 = np.uint64


def floats(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(U32)


@pytest.fixture
def words() -> list[np.ndarray]:
    """Three operands with the borders of 32 bits among them."""
    rng = np.random.default_rng(5)
    found = [rng.integers(0, 1 << 32, LANES).astype(U32) for _ in range(3)]
    borders = np.array([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 31, 32, 64], U32)
    for i, row in enumerate(found):
        row[: len(borders)] = np.roll(borders, i)
    return found


def signed(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int64) - ((x >> U32(31)).astype(np.int64) << 32)


INTEGERS = {
    "v_add_u32_e32 v10, v1, v2": lambda a, b, c: a + b,
    "v_subrev_u32_e32 v10, v1, v2": lambda a, b, c: b - a,
    "v_mul_lo_u32 v10, v1, v2": lambda a, b, c: a * b,
    "v_mul_hi_u32 v10, v1, v2": lambda a, b, c: (a.astype(U64) * b.astype(U64)) >> U64(32),
    "v_mul_hi_i32 v10, v1, v2": lambda a, b, c: (signed(a) * signed(b)) >> 32,
    "v_min_i32_e32 v10, v1, v2": lambda a, b, c: np.minimum(signed(a), signed(b)),
    "v_ashrrev_i32_e32 v10, v1, v2": lambda a, b, c: signed(b) >> (a & U32(31)).astype(np.int64),
    "v_lshl_or_b32 v10, v1, v2, v3": lambda a, b, c: (a << (b & U32(31))) | c,
    "v_bfi_b32 v10, v1, v2, v3": lambda a, b, c: (a & b) | (~a & c),
    "v_bfe_u32 v10, v1, 5, 9": lambda a, b, c: (a >> U32(5)) & U32(511),
    "v_bfe_i32 v10, v1, 5, 9": lambda a, b, c: signed((a >> U32(5)) << U32(23)) >> 23,
    "v_alignbit_b32 v10, v1, v2, 12": lambda a, b, c: (
        ((a.astype(U64) << U64(32)) | b.astype(U64)) >> U64(12)
    ),
    "v_mad_u32_u24 v10, v1, v2, v3": lambda a, b, c: (
        (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF)) + c
    ),
    "v_add_u32_e64 v10, v1, v2 clamp": lambda a, b, c: np.minimum(
        a.astype(U64) + b.astype(U64), 0xFFFFFFFF
    ),
    "v_bfrev_b32_e32 v10, v1": lambda a, b, c: np.array(
        [int(f"{int(x):032b}"[::-1], 2) for x in a], U32
    ),
    "v_ffbh_u32_e32 v10, v1": lambda a, b, c: np.array(
        [32 - int(x).bit_length() if x else 0xFFFFFFFF for x in a]
    ),
    "v_mbcnt_lo_u32_b32 v10, v1, v2": lambda a, b, c: np.array(
        [
            int(y) + (int(x) & ((1 << min(lane, 32)) - 1)).bit_count()
            for lane, x, y in zip(range(LANES), a, b, strict=True)
        ]
    ),
    "v_pk_lshrrev_b16 v10, v1, v2": lambda a, b, c: (
        ((b & U32(0xFFFF)) >> (a & U32(15)))
        | ((b >> U32(16)) >> ((a >> U32(16)) & U32(15))) << U32(16)
    ),
    "v_or_b32_sdwa v10, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_1":
        lambda a, b, c: (a >> U32(16)) | ((b >> U32(8)) & U32(255)),
    "v_mov_b32_e32 v10, v3\n v_add_u32_sdwa v10, v1, v2 dst_sel:BYTE_2 dst_unused:UNUSED_PRESERVE"
    " src0_sel:DWORD src1_sel:DWORD":
        lambda a, b, c: (c & U32(0xFF00FFFF)) | (((a + b) & U32(255)) << U32(16)),
    "v_mov_b32_dpp v10, v1 quad_perm:[3,0,2,1] row_mask:0xf bank_mask:0xf":
        lambda a, b, c: a[LANE // 4 * 4 + np.array([3, 0, 2, 1])[LANE % 4]],
    "v_mov_b32_dpp v10, v1 row_ror:3 row_mask:0xf bank_mask:0xf":
        lambda a, b, c: a[LANE // 16 * 16 + (LANE % 16 - 3) % 16],
    "v_mov_b32_dpp v10, v1 row_shr:2 row_mask:0xf bank_mask:0xf bound_ctrl:1":
        lambda a, b, c: np.where(LANE % 16 < 2, 0, a[np.maximum(LANE - 2, 0)]),
    "v_mov_b32_e32 v10, v2\n v_mov_b32_dpp v10, v1 row_bcast:15 row_mask:0xa bank_mask:0xf":
        lambda a, b, c: np.where(LANE // 16 % 2 == 1, a[LANE // 16 * 16 - 1], b),
    "ds_swizzle_b32 v10, v1 offset:swizzle(SWAP,16)\n s_waitcnt lgkmcnt(0)":
        lambda a, b, c: a[LANE ^ 16],
    "v_and_b32_e32 v9, 0xfc, v2\n ds_bpermute_b32 v10, v9, v1\n s_waitcnt lgkmcnt(0)":
        lambda a, b, c: a[(b & U32(0xFC)) >> U32(2)],
    "v_cmp_lt_i32_e32 vcc, v1, v2\n v_cndmask_b32_e32 v10, v1, v2, vcc":
        lambda a, b, c: np.where(signed(a) < signed(b), b, a),
    "v_readlane_b32 s20, v1, 17\n v_mov_b32_e32 v10, s20": lambda a, b, c: np.full(LANES, a[17]),
}  # fmt: skip


@pytest.mark.parametrize("text", INTEGERS)
def test_integers(text, words):
    expected = INTEGERS[text](*words)
    got = lanes(text, *words)[0]
    assert np.array_equal(got, np.asarray(expected).astype(np.int64).astype(U32))


def test_packed_moves_choose_words(words):
    """The low result is a word of the first source, the high one a word of the second, also where
    they are the sources' own registers."""
    a, b, c = words
    text = """
  v_mov_b32_e32 v4, v3
  v_mov_b32_e32 v3, v2
  v_mov_b32_e32 v2, v1
  v_pk_mov_b32 v[10:11], v[2:3], v[4:5] op_sel:[1,0]
  v_pk_mov_b32 v[12:13], v[2:3], v[2:3] op_sel:[0,1]
  v_pk_mov_b32 v[2:3], v[2:3], v[2:3] op_sel:[1,0]
  v_mov_b32_e32 v14, v2
  v_mov_b32_e32 v15, v3"""
    got = lanes(text, a, b, c, results=6)
    assert np.array_equal(got, np.stack([b, c, a, b, b, a]))


def test_carries_reach_the_upper_word(words):
    a, b, _ = words
    text = """
  v_add_co_u32_e32 v10, vcc, v1, v2
  v_addc_co_u32_e32 v11, vcc, v2, v1, vcc
  v_mad_u64_u32 v[12:13], s[20:21], v1, v2, v[10:11]
  v_sub_co_u32_e32 v14, vcc, v1, v2
  v_subb_co_u32_e32 v15, vcc, v2, v1, vcc"""
    got = lanes(text, a, b, results=6).astype(U64)
    wide = (b.astype(U64) << U64(32)) + a.astype(U64)
    other = (a.astype(U64) << U64(32)) + b.astype(U64)
    total = wide + other
    assert np.array_equal(got[0] | got[1] << U64(32), total)
    assert np.array_equal(got[2] | got[3] << U64(32), a.astype(U64) * b.astype(U64) + total)
    assert np.array_equal(got[4] | got[5] << U64(32), wide - other)


SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-42, -3e38, 3e38, 1.0, -1.0, 65520.0, 2**-24, 0.5, 2.5,
     4294967296.0, -2147483648.0], np.float32
)  # fmt: skip

REALS = {
    "v_add_f32_e64 v10, -v1, |v2|": lambda a, b, c: -a + np.abs(b),
    "v_max_f32_e32 v10, v1, v2": lambda a, b, c: np.fmax(a, b),
    "v_min_f32_e32 v10, v1, v2": lambda a, b, c: np.fmin(a, b),
    "v_trunc_f32_e32 v10, v1": lambda a, b, c: np.trunc(a),
    "v_rndne_f32_e32 v10, v1": lambda a, b, c: np.rint(a),
    "v_mul_f32_e64 v10, v1, v2 mul:2": lambda a, b, c: a * b * np.float32(2),
    "v_max_f32_e64 v10, v1, v1 clamp": lambda a, b, c: np.clip(np.nan_to_num(a, nan=0), 0, 1),
    "v_fma_f32 v10, v1, v2, v3": lambda a, b, c: (
        a.astype(np.longdouble) * b + c.astype(np.longdouble)
    ),
    "v_cvt_f16_f32_e32 v9, v1\n v_cvt_f32_f16_e32 v10, v9": lambda a, b, c: a.astype(np.float16),
}


@pytest.mark.parametrize("text", REALS)
def test_floats(text):
    rng = np.random.default_rng(7)
    rows = [np.concatenate([np.roll(SPECIAL, 5 * i), rng.normal(size=48)]) for i in range(3)]
    a, b, c = (row.astype(np.float32) for row in rows)
    with np.errstate(all="ignore"):
        expected = np.asarray(REALS[text](a, b, c)).astype(np.float32)
    got = lanes(text, *map(floats, (a, b, c)))[0].view(np.float32)
    assert np.array_equal(got, expected, equal_nan=True)


def test_division_is_ieee():
    """The compiler's own sequence, at the ends of the range too."""
    text = """
  v_div_scale_f32 v3, s[20:21], v2, v2, v1
  v_div_scale_f32 v5, vcc, v1, v2, v1
  v_rcp_f32_e32 v4, v3
  v_fma_f32 v6, -v3, v4, 1.0
  v_fmac_f32_e32 v4, v6, v4
  v_mul_f32_e32 v6, v5, v4
  v_fma_f32 v7, -v3, v6, v5
  v_fmac_f32_e32 v6, v7, v4
  v_fma_f32 v3, -v3, v6, v5
  v_div_fmas_f32 v3, v3, v4, v6
  v_div_fixup_f32 v10, v3, v2, v1"""
    rng = np.random.default_rng(3)
    for _ in range(40):
        a, b = (rng.normal(size=LANES) * 2.0 ** rng.integers(-126, 127, LANES) for _ in range(2))
        a, b = a.astype(np.float32), b.astype(np.float32)
        a[:16] = SPECIAL
        b[:16] = np.roll(SPECIAL, int(rng.integers(16)))
        with np.errstate(all="ignore"):
            expected = a / b
        got = lanes(text, floats(a), floats(b))[0].view(np.float32)
        tiny = np.abs(expected) < 2.0**-126  # rounded twice on the way to a subnormal number
        step = np.where(tiny, np.float32(2.0**-149), np.float32(0))
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        with np.errstate(invalid="ignore"):
            near = np.abs(got - expected) <= step
        assert (same | near).all()


def test_fp8_of_gfx942():
    """What is past 240 is NaN (0x80), as is NaN; there is no -0."""
    values = np.array([1.0, -1.0, 240.0, 247.0, 248.0, 1e9, np.nan, -0.0, 2**-11, 3 * 2**-11])
    row = np.resize(values, LANES)
    got = lanes("v_mov_b32_e32 v10, 0\n v_cvt_pk_fp8_f32 v10, v1, v1", floats(row))[0] & 255
    assert got[:10].tolist() == [0x40, 0xC0, 0x7F, 0x7F, 0x80, 0x80, 0x80, 0, 0, 2]


def test_waves_meet_at_barriers():
    """Every thread reads what the thread across the block has written to LDS."""
    text = """
  ds_write_b32 v63, v0
  s_waitcnt lgkmcnt(0)
  s_barrier
  v_xor_b32_e32 v1, 0x3fc, v63
  ds_read_b32 v2, v1
  s_waitcnt lgkmcnt(0)
  s_lshl_b32 s8, s2, 10
  v_add_u32_e32 v63, s8, v63
  global_store_dword v63, v2, s[4:5]"""
    out = np.zeros(512, U32)
    run(text, np.zeros(1, U32), out, threads=256, blocks=2, lds=1024)
    assert np.array_equal(out, np.tile(np.arange(255, -1, -1), 2))


def test_atomics_add_up():
    text = """
  v_mov_b32_e32 v1, 0
  ds_write_b32 v1, v1
  s_waitcnt lgkmcnt(0)
  v_mov_b32_e32 v2, 3
  ds_add_rtn_u32 v3, v1, v2
  s_waitcnt lgkmcnt(0)
  global_atomic_add v4, v1, v3, s[4:5] sc0
  s_waitcnt vmcnt(0)
  global_atomic_umax v1, v4, s[4:5] offset:4"""
    out = run(text, np.zeros(1, U32), np.zeros(2, U32), lds=4)
    steps = 3 * np.arange(LANES)
    assert out.tolist() == [steps.sum(), steps[:-1].sum()]


def test_scratch_is_each_lane_s():
    text = """
  scratch_store_dword off, v0, off offset:8
  s_waitcnt vmcnt(0)
  scratch_load_dword v10, off, off offset:8
  s_waitcnt vmcnt(0)
  global_store_dword v63, v10, s[4:5]"""
    assert np.array_equal(run(text, np.zeros(1, U32), np.zeros(64, U32), scratch=16), LANE)


WRITE = "ds_write_b32 v63, v0\n s_waitcnt lgkmcnt(0)\n"
FAULTS = {
    "store past the end": (
        "global_store_dword v63, v0, s[4:5] offset:4",
        "outside of every buffer",
    ),
    "load before the beginning": (
        "global_load_dword v1, v63, s[6:7] offset:-4",
        "outside of every buffer",
    ),
    "store to the arguments": (
        "v_mov_b32_e32 v1, 0\n global_store_dword v1, v0, s[0:1]",
        "read-only",
    ),
    "LDS past its end": ("ds_write_b32 v63, v0 offset:512", "LDS access"),
    "unwritten LDS": ("ds_read_b32 v1, v63\n s_waitcnt lgkmcnt(0)", "nobody wrote"),
    "read with no barrier": (
        WRITE + "v_xor_b32_e32 v1, 0x1fc, v63\n ds_read_b32 v2, v1\n s_waitcnt lgkmcnt(0)",
        "nobody wrote|LDS race",
    ),
    "write over another's": (
        "v_mov_b32_e32 v1, 0\n ds_write_b32 v1, v0\n s_waitcnt lgkmcnt(0)", "LDS race"
    ),
    "unaligned LDS": ("ds_write_b32 v63, v0 offset:2", "not aligned"),
    "a wave ends before the barrier": (
        "v_readfirstlane_b32 s8, v0\n s_cmp_lg_u32 s8, 0\n s_cbranch_scc1 1f\n s_endpgm\n"
        "1:\n s_barrier",
        "barrier",
    ),
    "no wait for a load": (
        "global_load_dword v1, v63, s[6:7]\n v_add_u32_e32 v1, 1, v1", "before s_waitcnt"
    ),
    "63 accesses under way": (
        "global_load_dword v1, v63, s[6:7]\n"
        + "global_load_dword v2, v63, s[6:7]\n" * 62
        + "v_add_u32_e32 v1, 1, v1",
        "v1 is used before",
    ),
    "too short a wait": (
        "global_load_dword v1, v63, s[6:7]\n global_load_dword v2, v63, s[6:7]\n"
        "s_waitcnt vmcnt(1)\n v_add_u32_e32 v1, 1, v2",
        "v2 is used before",
    ),
    "no wait for a scalar": (
        "s_load_dword s8, s[6:7], 0x0\n s_add_u32 s8, s8, 1", "s8 is used before"
    ),
    "matrix product with lanes off": (
        "s_mov_b64 exec, 0xff\n v_mfma_f32_16x16x4_f32 v[10:13], v1, v2, 0", "lanes off"
    ),
    "unknown instruction": ("v_cos_f16_e32 v1, v2", "unknown instruction"),
    "scratch past its end": ("scratch_store_dword off, v0, off offset:16", "scratch access"),
    "trap": ("s_trap 2", "s_trap"),
    "jump to nowhere": ("s_mov_b64 s[8:9], 0\n s_setpc_b64 s[8:9]", "no instruction begins"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_refused(what):
    body, text = FAULTS[what]
    with pytest.raises(Refused, match=text):
        run(body, np.zeros(128, U32), np.zeros(128, U32), threads=128, lds=512, scratch=16)


def test_refused_launches():
    with pytest.raises(Refused, match="at most 1024"):
        run("s_nop 0", np.zeros(1, U32), np.zeros(1, U32), threads=2048)
    with pytest.raises(Refused, match="LDS"):
        run("s_nop 0", np.zeros(1, U32), np.zeros(1, U32), lds=65540)


def test_faults_say_where():
    with pytest.raises(Refused, match=r"global_store_dword at 0x\w+ of test, block 1 0 0, wave 0"):
        run(
            "s_lshl_b32 s8, s2, 8\n v_add_u32_e32 v1, s8, v63\n global_store_dword v1, v0, s[4:5]",
            np.zeros(1, U32),
            np.zeros(64, U32),
            blocks=2,
        )


def test_a_code_object_of_another_gpu_is_refused():
    import ctypes

    hip = library.load()
    image = assembly.assemble("s_nop 0", target="gfx90a")
    module = ctypes.c_void_p()
    assert hip.hipModuleLoadData(ctypes.byref(module), image) == 209


def test_the_packet_says_the_shape_of_a_launch():
    """What HSA's packet has of the block and the grid: the compiler reads them there where it moves
    a thread's array to LDS."""
    body = """
  s_load_dwordx2 s[10:11], s[8:9], 0x4
  s_load_dwordx4 s[12:15], s[8:9], 0xc
  s_load_dword s16, s[8:9], 0x1c
  s_waitcnt lgkmcnt(0)
  v_mov_b32_e32 v1, s10
  v_mov_b32_e32 v2, s11
  v_mov_b32_e32 v3, s12
  v_mov_b32_e32 v4, s15
  v_mov_b32_e32 v5, s16"""
    for i in range(5):
        body += f"\n  global_store_dword v63, v{i + 1}, s[4:5] offset:{4 * LANES * i}"
    out = np.zeros((5, LANES), U32)
    run(body, np.zeros(1, U32), out, blocks=3, packet=True, lds=512, scratch=32)
    assert [set(row.tolist()) for row in out] == [
        {LANES | 1 << 16}, {1}, {3 * LANES}, {32}, {512}
    ]  # fmt: skip


def test_a_full_counter_waits_by_itself():
    """With 63 younger accesses under way the oldest has come: vmcnt counts no further."""
    body = "global_load_dword v1, v63, s[6:7]\n"
    body += "global_load_dword v2, v63, s[6:7]\n" * 63
    body += "v_add_u32_e32 v1, 1, v1\n global_store_dword v63, v1, s[4:5]"
    given = np.arange(LANES, dtype=U32)
    assert np.array_equal(run(body, given, np.zeros(LANES, U32)), given + 1)
