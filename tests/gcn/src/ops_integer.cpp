// Vector instructions on integers and bits.
#include "lanes.h"

namespace gcn {
namespace {

u32 low24(u32 x) {
  return x & 0xffffff;
}
i32 signed24(u32 x) {
  return static_cast<i32>(x << 8) >> 8;
}
u32 word(i64 x) {
  return static_cast<u32>(x);
}
template <class T>
T middle(T a, T b, T c) {
  return a < b ? (b < c ? b : (a < c ? c : a)) : (a < c ? a : (b < c ? c : b));
}

// v_add_co_u32 v0, vcc, a, b: sum, carries, sources, and the carries that come in.
template <auto F, bool takes_carry>
void carry(Wave& w, const Instruction& in) {
  const Source<u32> a(w, in.op[2]), b(w, in.op[3]);
  alignas(64) Lanes in_carry{}, sum, out_carry;
  if (takes_carry) expand_mask(w.lane_mask(in.op[4]), in_carry.data());
  for (unsigned l = 0; l < kLanes; l++) {
    const u64 result = F(u64{a[l]}, u64{b[l]}, u64{in_carry[l] & 1});
    sum[l] = static_cast<u32>(result);
    out_carry[l] = static_cast<u32>(result >> 32);
  }
  set_lanes(w, in.op[0], sum.data());
  w.set_scalar_pair(in.op[1], mask_of(out_carry.data()) & w.exec());
}

template <bool adds>
void saturating(Wave& w, const Instruction& in) {
  if (!in.clamped) {
    if (adds)
      lanes<[](u32 a, u32 b) { return a + b; }>(w, in);
    else
      lanes<[](u32 a, u32 b) { return a - b; }>(w, in);
  } else if (adds) {
    lanes<[](u32 a, u32 b) { return a + b < a ? ~0u : a + b; }>(w, in);
  } else {
    lanes<[](u32 a, u32 b) { return a < b ? 0u : a - b; }>(w, in);
  }
}

void select(Wave& w, const Instruction& in) {
  const Source<u32> a(w, in.op[1]), b(w, in.op[2]);
  alignas(64) Lanes mask, out;
  expand_mask(w.lane_mask(in.op[3]), mask.data());
  for (unsigned l = 0; l < kLanes; l++) out[l] = mask[l] ? b[l] : a[l];
  set_lanes(w, in.op[0], out.data());
}

// v_mad_u64_u32 v[0:1], vcc, a, b, c; the carry of the 64-bit sum.
template <class T>
void multiply_add_wide(Wave& w, const Instruction& in) {
  const Source<T> a(w, in.op[2]), b(w, in.op[3]);
  const Source<u64> c(w, in.op[4]);
  using Wide = std::conditional_t<std::is_signed_v<T>, i64, u64>;
  u64 out[kLanes];
  alignas(64) Lanes carries;
  for (unsigned l = 0; l < kLanes; l++) {
    const u64 product = static_cast<u64>(Wide{a[l]} * Wide{b[l]});
    out[l] = product + c[l];
    carries[l] = out[l] < product;
  }
  set_lanes(w, in.op[0], out);
  w.set_scalar_pair(in.op[1], mask_of(carries.data()) & w.exec());
}

template <unsigned base>
void count_below(Wave& w, const Instruction& in) {
  const Source<u32> mask(w, in.op[1]), start(w, in.op[2]);
  Lanes out;
  for (unsigned l = 0; l < kLanes; l++) {
    const unsigned below = l <= base ? 0 : std::min(l - base, 32u);
    out[l] = start[l] + std::popcount(static_cast<u32>(mask[l] & ((u64{1} << below) - 1)));
  }
  set_lanes(w, in.op[0], out.data());
}

void read_first(Wave& w, const Instruction& in) {
  Lanes hold;
  const u32* row = w.source(in.op[1], 0, hold);
  w.set_scalar(in.op[0], row[w.exec() ? std::countr_zero(w.exec()) : 0]);
}
void read_lane(Wave& w, const Instruction& in) {
  Lanes hold;
  w.set_scalar(in.op[0], w.source(in.op[1], 0, hold)[w.scalar(in.op[2]) & 63]);
}
void write_lane(Wave& w, const Instruction& in) {
  w.vector(in.op[0].index)[w.scalar(in.op[2]) & 63] = w.scalar(in.op[1]);
}

// Bytes of b (0 to 3) and a (4 to 7), a sign of them, 0 or 255.
u32 permute(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64{a} << 32 | b;
  u32 out = 0;
  for (unsigned i = 0; i < 4; i++) {
    const u32 which = selector >> (8 * i) & 255;
    u32 byte = 255;
    if (which < 8)
      byte = bytes >> (8 * which) & 255;
    else if (which < 12)
      byte = bytes >> (16 * (which - 8) + 15) & 1 ? 255 : 0;
    else if (which == 12)
      byte = 0;
    out |= byte << (8 * i);
  }
  return out;
}

u32 reversed(u32 x) {
  x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
  x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
  x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(x);
}

void add_arithmetic(Table& t) {
  const Entry entries[] = {
      {"v_add_u32", saturating<true>},
      {"v_sub_u32", saturating<false>},
      {"v_subrev_u32", lanes<[](u32 a, u32 b) { return b - a; }>},
      {"v_add3_u32", lanes<[](u32 a, u32 b, u32 c) { return a + b + c; }>},
      {"v_mul_lo_u32", lanes<[](u32 a, u32 b) { return a * b; }>},
      {"v_mul_hi_u32", lanes<[](u32 a, u32 b) { return static_cast<u32>(u64{a} * b >> 32); }>},
      {"v_mul_hi_i32", lanes<[](i32 a, i32 b) { return static_cast<i32>(i64{a} * b >> 32); }>},
      {"v_mul_u32_u24", lanes<[](u32 a, u32 b) { return low24(a) * low24(b); }>},
      {"v_mul_i32_i24", lanes<[](u32 a, u32 b) { return word(i64{signed24(a)} * signed24(b)); }>},
      {"v_mul_hi_u32_u24", lanes<[](u32 a, u32 b) { return static_cast<u32>(u64{low24(a)} * low24(b) >> 32); }>},
      {"v_mad_u32_u24", lanes<[](u32 a, u32 b, u32 c) { return low24(a) * low24(b) + c; }>},
      {"v_mad_i32_i24", lanes<[](u32 a, u32 b, u32 c) { return word(i64{signed24(a)} * signed24(b)) + c; }>},
      {"v_mad_u64_u32", multiply_add_wide<u32>},
      {"v_mad_i64_i32", multiply_add_wide<i32>},
      {"v_add_co_u32", carry<[](u64 a, u64 b, u64) { return a + b; }, false>},
      {"v_sub_co_u32", carry<[](u64 a, u64 b, u64) { return a - b; }, false>},
      {"v_subrev_co_u32", carry<[](u64 a, u64 b, u64) { return b - a; }, false>},
      {"v_addc_co_u32", carry<[](u64 a, u64 b, u64 c) { return a + b + c; }, true>},
      {"v_subb_co_u32", carry<[](u64 a, u64 b, u64 c) { return a - b - c; }, true>},
      {"v_subbrev_co_u32", carry<[](u64 a, u64 b, u64 c) { return b - a - c; }, true>},
      {"v_max_u32", lanes<[](u32 a, u32 b) { return std::max(a, b); }>},
      {"v_min_u32", lanes<[](u32 a, u32 b) { return std::min(a, b); }>},
      {"v_max_i32", lanes<[](i32 a, i32 b) { return std::max(a, b); }>},
      {"v_min_i32", lanes<[](i32 a, i32 b) { return std::min(a, b); }>},
      {"v_max3_u32", lanes<[](u32 a, u32 b, u32 c) { return std::max(std::max(a, b), c); }>},
      {"v_max3_i32", lanes<[](i32 a, i32 b, i32 c) { return std::max(std::max(a, b), c); }>},
      {"v_min3_u32", lanes<[](u32 a, u32 b, u32 c) { return std::min(std::min(a, b), c); }>},
      {"v_min3_i32", lanes<[](i32 a, i32 b, i32 c) { return std::min(std::min(a, b), c); }>},
      {"v_med3_u32", lanes<[](u32 a, u32 b, u32 c) { return middle(a, b, c); }>},
      {"v_med3_i32", lanes<[](i32 a, i32 b, i32 c) { return middle(a, b, c); }>},
      {"v_add_u16", lanes<[](u32 a, u32 b) { return (a + b) & 0xffff; }>},
      {"v_sub_u16", lanes<[](u32 a, u32 b) { return (a - b) & 0xffff; }>},
      {"v_mul_lo_u16", lanes<[](u32 a, u32 b) { return (a & 0xffff) * (b & 0xffff) & 0xffff; }>},
      {"v_max_u16", lanes<[](u32 a, u32 b) { return std::max(a & 0xffff, b & 0xffff); }>},
      {"v_min_u16", lanes<[](u32 a, u32 b) { return std::min(a & 0xffff, b & 0xffff); }>},
      {"v_mad_legacy_u16", lanes<[](u32 a, u32 b, u32 c) { return (a * b + c) & 0xffff; }>},
      {"v_lshl_add_u64", lanes<[](u64 a, u32 b, u64 c) { return (a << (b & 7)) + c; }>},
      {"v_sad_u32", lanes<[](u32 a, u32 b, u32 c) { return ((a > b ? a - b : b - a) + c); }>},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

void add_bits(Table& t) {
  const Entry entries[] = {
      {"v_mov_b32", lanes<[](u32 a) { return a; }>},
      {"v_mov_b64", lanes<[](u64 a) { return a; }>},
      {"v_accvgpr_read_b32", lanes<[](u32 a) { return a; }>},
      {"v_accvgpr_write_b32", lanes<[](u32 a) { return a; }>},
      {"v_accvgpr_mov_b32", lanes<[](u32 a) { return a; }>},
      {"v_not_b32", lanes<[](u32 a) { return ~a; }>},
      {"v_and_b32", lanes<[](u32 a, u32 b) { return a & b; }>},
      {"v_or_b32", lanes<[](u32 a, u32 b) { return a | b; }>},
      {"v_xor_b32", lanes<[](u32 a, u32 b) { return a ^ b; }>},
      {"v_xnor_b32", lanes<[](u32 a, u32 b) { return ~(a ^ b); }>},
      {"v_or3_b32", lanes<[](u32 a, u32 b, u32 c) { return a | b | c; }>},
      {"v_and_or_b32", lanes<[](u32 a, u32 b, u32 c) { return (a & b) | c; }>},
      {"v_xad_u32", lanes<[](u32 a, u32 b, u32 c) { return (a ^ b) + c; }>},
      {"v_lshlrev_b32", lanes<[](u32 a, u32 b) { return b << (a & 31); }>},
      {"v_lshrrev_b32", lanes<[](u32 a, u32 b) { return (b >> (a & 31)); }>},
      {"v_ashrrev_i32", lanes<[](u32 a, i32 b) { return (b >> (a & 31)); }>},
      {"v_lshlrev_b16", lanes<[](u32 a, u32 b) { return b << (a & 15) & 0xffff; }>},
      {"v_lshrrev_b16", lanes<[](u32 a, u32 b) { return ((b & 0xffff) >> (a & 15)); }>},
      {"v_ashrrev_i16",
       lanes<[](u32 a, u32 b) { return (static_cast<u32>(static_cast<int16_t>(b) >> (a & 15)) & 0xffff); }>},
      {"v_lshlrev_b64", lanes<[](u32 a, u64 b) { return b << (a & 63); }>},
      {"v_lshrrev_b64", lanes<[](u32 a, u64 b) { return (b >> (a & 63)); }>},
      {"v_ashrrev_i64", lanes<[](u32 a, i64 b) { return (b >> (a & 63)); }>},
      {"v_lshl_add_u32", lanes<[](u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; }>},
      {"v_add_lshl_u32", lanes<[](u32 a, u32 b, u32 c) { return (a + b) << (c & 31); }>},
      {"v_lshl_or_b32", lanes<[](u32 a, u32 b, u32 c) { return (a << (b & 31)) | c; }>},
      {"v_bfe_u32", lanes<[](u32 a, u32 b, u32 c) { return ((a >> (b & 31)) & ((1u << (c & 31)) - 1)); }>},
      {"v_bfe_i32", lanes<[](u32 a, u32 b, u32 c) {
         const u32 width = c & 31, top = 32 - width;
         return (width ? static_cast<i32>((a >> (b & 31)) << (top & 31)) >> (top & 31) : 0);
       }>},
      {"v_bfi_b32", lanes<[](u32 a, u32 b, u32 c) { return (a & b) | (~a & c); }>},
      {"v_bfm_b32", lanes<[](u32 a, u32 b) { return (((1u << (a & 31)) - 1) << (b & 31)); }>},
      {"v_bfrev_b32", lanes<[](u32 a) { return reversed(a); }>},
      {"v_bcnt_u32_b32", lanes<[](u32 a, u32 b) { return b + std::popcount(a); }>},
      {"v_ffbh_u32", lanes<[](u32 a) { return a ? static_cast<u32>(std::countl_zero(a)) : ~0u; }>},
      {"v_ffbl_b32", lanes<[](u32 a) { return a ? static_cast<u32>(std::countr_zero(a)) : ~0u; }>},
      {"v_alignbit_b32", lanes<[](u32 a, u32 b, u32 c) { return static_cast<u32>((u64{a} << 32 | b) >> (c & 31)); }>},
      {"v_alignbyte_b32",
       lanes<[](u32 a, u32 b, u32 c) { return static_cast<u32>((u64{a} << 32 | b) >> (8 * (c & 3))); }>},
      {"v_perm_b32", lanes<[](u32 a, u32 b, u32 c) { return permute(a, b, c); }>},
      {"v_pack_b32_f16", lanes<[](u32 a, u32 b) { return (a & 0xffff) | b << 16; }>},
      {"v_mbcnt_lo_u32_b32", count_below<0>},
      {"v_mbcnt_hi_u32_b32", count_below<32>},
      {"v_cndmask_b32", select},
      {"v_readfirstlane_b32", read_first},
      {"v_readlane_b32", read_lane},
      {"v_writelane_b32", write_lane},
      {"v_nop", [](Wave&, const Instruction&) {}},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

}  // namespace

void add_integer(Table& table) {
  add_arithmetic(table);
  add_bits(table);
}

}  // namespace gcn
