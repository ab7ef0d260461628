// What gfx950 has beyond gfx942; its matrix products are with the others.
#include <algorithm>

#include "fp8.h"
#include "lanes.h"

namespace gcn {
namespace {

// Three-input logic: bit 4 a + 2 b + c of the table is the result for bits a, b and c.
// Of 16 bits the upper half stays.
template <u32 mask>
void bitwise(Wave& w, const Instruction& in) {
  if (in.op_sel) fault("op_sel");
  const Source<u32> a(w, in.op[1]), b(w, in.op[2]), c(w, in.op[3]);
  u32 results[kLanes] = {};
  for (unsigned k = 0; k < 8; k++) {
    if (!(in.truth_table >> k & 1)) continue;
    const u32 flip_a = k & 4 ? 0 : ~0u, flip_b = k & 2 ? 0 : ~0u, flip_c = k & 1 ? 0 : ~0u;
    for (unsigned l = 0; l < kLanes; l++) results[l] |= (a[l] ^ flip_a) & (b[l] ^ flip_b) & (c[l] ^ flip_c);
  }
  const u32* before = w.vector(in.op[0].index);
  for (unsigned l = 0; l < kLanes; l++) results[l] = (results[l] & mask) | (before[l] & ~mask);
  set_lanes(w, in.op[0], results);
}

u32 to_f16(float x) {
  return std::bit_cast<uint16_t>(static_cast<half>(x));
}

u32 to_bf16(float x) {  // to the nearest, ties to even
  const u32 bits = std::bit_cast<u32>(x);
  if (x != x) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Two 8-bit floats, of the half that op_sel says, times the power of two in a float's exponent.
void widen_pair(Wave& w, const Instruction& in) {
  const Source<u32> pair(w, in.op[1]), scale(w, in.op[2]);
  const Fp8 format(3, false);
  u32 results[kLanes];
  for (unsigned l = 0; l < kLanes; l++) {
    const u32 bits = pair[l] >> (in.op_sel & 1 ? 16 : 0);
    const int exponent = static_cast<int>(scale[l] >> 23 & 255) - 127;
    const float low = std::ldexp(format.decode(static_cast<uint8_t>(bits)), exponent);
    const float high = std::ldexp(format.decode(static_cast<uint8_t>(bits >> 8)), exponent);
    results[l] = to_bf16(low) | to_bf16(high) << 16;
  }
  set_lanes(w, in.op[0], results);
}

// Rows of 16 lanes change places: with 16, rows 1 and 3 of the first register with rows 0 and 2 of the second; with
// 32, rows 2 and 3 with rows 0 and 1.
template <unsigned step>
void swap_rows(Wave& w, const Instruction& in) {
  if (w.exec() != ~u64{0}) fault("rows are swapped with lanes off");
  u32* first = w.vector(in.op[0].index);
  u32* second = w.vector(in.op[1].index);
  for (unsigned l = 0; l < kLanes; l++)
    if (l & step) std::swap(first[l], second[l ^ step]);
}

// Each 16 lanes read a matrix of 16 columns, a row of which lies in the 8 bytes of several lanes, and get a column
// each.
template <unsigned bytes>
void read_transposed(Wave& w, const Instruction& in) {
  if (w.exec() != ~u64{0}) fault("a transposed read with lanes off");
  constexpr unsigned elements = 8 / bytes;
  uint8_t data[kLanes][8], out[kLanes][8];
  const u32* address = w.vector(in.op[1].index);
  for (unsigned l = 0; l < kLanes; l++) {
    const u64 at = u64{address[l]} + in.offset;
    if (at % 8) fault("LDS access of 8 bytes at %lu, which is not aligned", at);
    w.block.lds.load(at, data[l], 8, w.number);
  }
  for (unsigned l = 0; l < kLanes; l++) {
    const unsigned group = l & ~15u, column = l & 15;
    for (unsigned row = 0; row < elements; row++) {
      const uint8_t* from = data[group + row * (16 / elements) + column / elements];
      std::memcpy(out[l] + row * bytes, from + column % elements * bytes, bytes);
    }
  }
  for (unsigned l = 0; l < kLanes; l++)
    for (unsigned i = 0; i < 2; i++) std::memcpy(w.vector(in.op[0].index + i) + l, out[l] + 4 * i, 4);
  w.issued(Wave::Queue::kLds, &in.op[0], 2);
}

}  // namespace

void add_gfx950(Table& t) {
  const Entry entries[] = {
      {"v_bitop3_b32", bitwise<0xffffffff>},
      {"v_bitop3_b16", bitwise<0xffff>},
      {"v_cvt_scalef32_pk_bf16_fp8", widen_pair},
      {"v_cvt_pk_bf16_f32", lanes<[](float a, float b) -> u32 { return to_bf16(a) | to_bf16(b) << 16; }>},
      {"v_cvt_pk_f16_f32", lanes<[](float a, float b) -> u32 { return to_f16(a) | to_f16(b) << 16; }>},
      {"v_permlane16_swap_b32", swap_rows<16>},
      {"v_permlane32_swap_b32", swap_rows<32>},
      {"ds_read_b64_tr_b16", read_transposed<2>},
      {"ds_read_b64_tr_b8", read_transposed<1>},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

}  // namespace gcn
