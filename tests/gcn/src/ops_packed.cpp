// Two results a lane: packed halves, packed floats, halves and floats mixed, FP8.
#include <algorithm>

#include "fp8.h"
#include "lanes.h"

namespace gcn {
namespace {

bool bit(uint8_t bits, unsigned i) {
  return bits >> i & 1;
}

// Word or half that a source gives to the low (0) or high (1) result.
unsigned selected(const Instruction& in, unsigned source, unsigned result) {
  return bit(result ? in.op_sel_hi : in.op_sel, source);
}
bool flipped(const Instruction& in, unsigned source, unsigned result) {
  return bit(result ? in.neg_hi : in.neg_lo, source);
}

template <auto F, unsigned sources>
void packed_floats(Wave& w, const Instruction& in) {
  alignas(64) float results[2][kLanes];
  for (unsigned r = 0; r < 2; r++) {
    float x[3][kLanes];
    for (unsigned i = 0; i < sources; i++) {
      const Operand& op = in.op[1 + i];
      Lanes hold;
      const u32* row = w.source(op, op.kind == Operand::Kind::kLiteral ? 0 : selected(in, i, r), hold);
      const u32 flip = flipped(in, i, r) ? 0x80000000 : 0;
      for (unsigned l = 0; l < kLanes; l++) x[i][l] = std::bit_cast<float>(row[l] ^ flip);
    }
    for (unsigned l = 0; l < kLanes; l++) results[r][l] = F(x[0][l], x[1][l], sources > 2 ? x[2][l] : 0.0f);
  }
  Operand to = in.op[0];
  set_lanes(w, to, results[0]);
  to.index++;
  set_lanes(w, to, results[1]);
}

// The low result is a word of the first source, the high one a word of the second; op_sel says which. The destination
// may be among the sources.
void packed_move(Wave& w, const Instruction& in) {
  u32 results[2][kLanes];
  for (unsigned r = 0; r < 2; r++) {
    const Operand& op = in.op[1 + r];
    Lanes hold;
    const u32* row = w.source(op, op.kind == Operand::Kind::kLiteral ? 0 : bit(in.op_sel, r), hold);
    std::copy_n(row, kLanes, results[r]);
  }
  Operand to = in.op[0];
  set_lanes(w, to, results[0]);
  to.index++;
  set_lanes(w, to, results[1]);
}

// F of 16-bit patterns.
template <auto F, unsigned sources>
void packed_halves(Wave& w, const Instruction& in) {
  Lanes hold[3], out{};
  const u32* row[3];
  for (unsigned i = 0; i < sources; i++) row[i] = w.source(in.op[1 + i], 0, hold[i]);
  for (unsigned r = 0; r < 2; r++) {
    for (unsigned l = 0; l < kLanes; l++) {
      uint16_t x[3] = {0, 0, 0};
      for (unsigned i = 0; i < sources; i++) {
        x[i] = static_cast<uint16_t>(row[i][l] >> (16 * selected(in, i, r)));
        if (flipped(in, i, r)) x[i] ^= 0x8000;
      }
      out[l] |= u32{static_cast<uint16_t>(F(x[0], x[1], x[2]))} << (16 * r);
    }
  }
  set_lanes(w, in.op[0], out.data());
}

float real(uint16_t bits) {
  return static_cast<float>(std::bit_cast<half>(bits));
}
uint16_t bits_of(double value) {
  return std::bit_cast<uint16_t>(static_cast<half>(value));
}

// Each source is a float, or a half of a register: op_sel_hi says which, op_sel what half.
void mixed_sources(Wave& w, const Instruction& in, float x[3][kLanes]) {
  for (unsigned i = 0; i < 3; i++) {
    const Operand& op = in.op[1 + i];
    Lanes hold;
    const u32* row = w.source(op, 0, hold);
    const bool is_half = bit(in.op_sel_hi, i), upper = bit(in.op_sel, i);
    for (unsigned l = 0; l < kLanes; l++) {
      float value = is_half ? real(static_cast<uint16_t>(upper ? row[l] >> 16 : row[l])) : std::bit_cast<float>(row[l]);
      if (op.magnitude) value = std::fabs(value);
      x[i][l] = op.negated ? -value : value;
    }
  }
}

void mix(Wave& w, const Instruction& in) {
  float x[3][kLanes], out[kLanes];
  mixed_sources(w, in, x);
  for (unsigned l = 0; l < kLanes; l++) out[l] = __builtin_fmaf(x[0][l], x[1][l], x[2][l]);
  set_lanes(w, in.op[0], out);
}

template <bool upper>
void mix_half(Wave& w, const Instruction& in) {
  float x[3][kLanes];
  mixed_sources(w, in, x);
  Lanes out;
  const u32* before = w.vector(in.op[0].index);
  for (unsigned l = 0; l < kLanes; l++) {
    const u32 result = bits_of(__builtin_fmaf(x[0][l], x[1][l], x[2][l]));
    out[l] = upper ? (before[l] & 0xffff) | result << 16 : (before[l] & 0xffff0000) | result;
  }
  set_lanes(w, in.op[0], out.data());
}

template <int mantissa>
Fp8 format(const Wave& w) {
  return Fp8(mantissa, w.program.object.target == "gfx942");
}

// Two floats into the half of a register that op_sel's bit of the destination says.
template <int mantissa>
void to_fp8_pair(Wave& w, const Instruction& in) {
  const Source<float> a(w, in.op[1]), b(w, in.op[2]);
  const Fp8 fp8 = format<mantissa>(w);
  const bool upper = bit(in.op_sel, 2) || bit(in.op_sel, 3);
  const u32* before = w.vector(in.op[0].index);
  Lanes out;
  for (unsigned l = 0; l < kLanes; l++) {
    const u32 codes = fp8.encode(a[l]) | fp8.encode(b[l]) << 8;
    out[l] = upper ? (before[l] & 0xffff) | codes << 16 : (before[l] & 0xffff0000) | codes;
  }
  set_lanes(w, in.op[0], out.data());
}

template <int mantissa>
void from_fp8(Wave& w, const Instruction& in) {
  const Source<u32> a(w, in.op[1]);
  const Fp8 fp8 = format<mantissa>(w);
  float out[kLanes];
  for (unsigned l = 0; l < kLanes; l++) out[l] = fp8.decode(static_cast<uint8_t>(a[l]));
  set_lanes(w, in.op[0], out);
}

template <int mantissa>
void from_fp8_pair(Wave& w, const Instruction& in) {
  const Source<u32> a(w, in.op[1]);
  const Fp8 fp8 = format<mantissa>(w);
  const unsigned shift = bit(in.op_sel, 0) ? 16 : 0;
  Operand to = in.op[0];
  for (unsigned r = 0; r < 2; r++, to.index++) {
    float out[kLanes];
    for (unsigned l = 0; l < kLanes; l++) out[l] = fp8.decode(static_cast<uint8_t>(a[l] >> (shift + 8 * r)));
    set_lanes(w, to, out);
  }
}

}  // namespace

void add_packed(Table& t) {
  using H = uint16_t;
  const Entry entries[] = {
      {"v_pk_add_f32", packed_floats<[](float a, float b, float) { return a + b; }, 2>},
      {"v_pk_mul_f32", packed_floats<[](float a, float b, float) { return a * b; }, 2>},
      {"v_pk_fma_f32", packed_floats<[](float a, float b, float c) { return __builtin_fmaf(a, b, c); }, 3>},
      {"v_pk_mov_b32", packed_move},
      {"v_pk_add_f16", packed_halves<[](H a, H b, H) { return bits_of(real(a) + real(b)); }, 2>},
      {"v_pk_mul_f16", packed_halves<[](H a, H b, H) { return bits_of(real(a) * real(b)); }, 2>},
      {"v_pk_fma_f16", packed_halves<[](H a, H b, H c) { return bits_of(double{real(a)} * real(b) + real(c)); }, 3>},
      {"v_pk_add_u16", packed_halves<[](H a, H b, H) { return a + b; }, 2>},
      {"v_pk_sub_u16", packed_halves<[](H a, H b, H) { return a - b; }, 2>},
      {"v_pk_sub_i16", packed_halves<[](H a, H b, H) { return a - b; }, 2>},
      {"v_pk_mul_lo_u16", packed_halves<[](H a, H b, H) { return u32{a} * b; }, 2>},
      {"v_pk_lshlrev_b16", packed_halves<[](H a, H b, H) { return b << (a & 15); }, 2>},
      {"v_pk_lshrrev_b16", packed_halves<[](H a, H b, H) { return (b >> (a & 15)); }, 2>},
      {"v_fma_mix_f32", mix},
      {"v_fma_mixlo_f16", mix_half<false>},
      {"v_fma_mixhi_f16", mix_half<true>},
      {"v_cvt_pk_f16_f32", lanes<[](float a, float b) { return u32{bits_of(a)} | u32{bits_of(b)} << 16; }>},
      {"v_cvt_pk_fp8_f32", to_fp8_pair<3>},
      {"v_cvt_pk_bf8_f32", to_fp8_pair<2>},
      {"v_cvt_f32_fp8", from_fp8<3>},
      {"v_cvt_f32_bf8", from_fp8<2>},
      {"v_cvt_pk_f32_fp8", from_fp8_pair<3>},
      {"v_cvt_pk_f32_bf8", from_fp8_pair<2>},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

}  // namespace gcn
