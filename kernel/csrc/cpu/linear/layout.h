// The packed weight layouts. A block is 16 outputs wide; N is padded to 16, K with zeros.
//
//   pairs16 (bfloat16)          [N/16][K/2][16][2]   one 64-byte line = 16 outputs x 2 consecutive k
//   lanes16 (float32, float16)  [N/16][K][16]        one line = 16 outputs of one k
//   quads16 (8-bit codes)       [N/16] x { [K/4][16][4], scales [groups][16], minima [groups][16] }
//                                                    one line = 16 outputs x 4 consecutive k
//   nibbles16 (4-bit codes)     [N/16] x { [K/8][16][4], scales [groups][16], zeros uint8 [groups][16],
//                                          or minima [groups][16] }
//                                                    one line = 16 outputs x 8 k: the quads16 line of k .. k + 3 in the
//                                                    low halves of its bytes, that of k + 4 .. k + 7 in the high ones
//
// A block of pairs16 or quads16 is also a stack of AMX B tiles (16 lines, 1 KiB each), which is why K is padded to 32
// and 64 there. All layouts stream: a thread reads its blocks front to back.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "radix_kernels/linear.h"

namespace radix::cpu::linear_layout {

constexpr int64_t kBlockN = 16;
constexpr int64_t kLine = 64;  // bytes
constexpr int64_t kPadK = 32;
static_assert(kBlockN * 4 == kLine, "a float32 line of a block; 4 bytes an output of the others");
static_assert(kPadK * 2 % kLine == 0, "whole AMX tiles of 16-bit weights");

constexpr int64_t round_up(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}
constexpr int64_t padded_k(int64_t k) {
  return round_up(k, kPadK);
}
constexpr int64_t num_blocks(int64_t n) {
  return (n + kBlockN - 1) / kBlockN;
}
constexpr int64_t elements(int64_t n, int64_t k) {
  return num_blocks(n) * kBlockN * padded_k(k);
}

// How far ahead, in bytes, a stream fetches that is `offset` bytes into one of `blocks` neighbouring blocks read side
// by side: past the block's end it goes on in the block that it reads next.
constexpr int64_t fetch_ahead(int64_t offset, int64_t block_bytes, int blocks, int64_t distance) {
  return offset + distance < block_bytes ? distance : distance + (blocks - 1) * block_bytes;
}

// Offset of weight element (n, k) in elements.
constexpr int64_t pairs16_offset(int64_t n, int64_t k, int64_t kp) {
  return (n / kBlockN) * kBlockN * kp + (k / 2) * 2 * kBlockN + (n % kBlockN) * 2 + k % 2;
}
constexpr int64_t lanes16_offset(int64_t n, int64_t k, int64_t kp) {
  return (n / kBlockN) * kBlockN * kp + k * kBlockN + n % kBlockN;
}

// Where the parts of a quantized weight lie. Offsets within a block are in bytes.
struct Quantized {
  int bits;     // of a code
  bool int8_x;  // x is quantized too
  bool has_zeros, has_mins;
  DType scale_type;  // of minima too
  int64_t k, kp;
  int64_t group;                       // inputs that share a scale; kp when a row has one
  int64_t groups;                      // of the padded row; the scales of padding are 0
  int64_t groups_k;                    // that hold inputs
  int64_t scales, zeros, mins, block;  // offsets of scales, zeros and minima, size of a block

  explicit Quantized(const rk_packed_desc& d)
      : bits(d.kind == RK_WEIGHT_INT8 || d.kind == RK_WEIGHT_W8A8 ? 8 : 4),
        int8_x(d.kind == RK_WEIGHT_W8A8 || d.kind == RK_WEIGHT_W4A8),
        has_zeros(d.zeros != 0),
        has_mins(d.mins != 0),
        scale_type(dtype_of(d.scale_dtype)),
        k(d.k) {
    kp = round_up(k, d.group > kLine ? d.group : kLine);
    group = d.group ? d.group : kp;
    groups = kp / group;
    groups_k = (k + group - 1) / group;
    scales = kBlockN * kp * bits / 8;
    const int64_t scale_bytes = round_up(groups * kBlockN * (d.scale_dtype.bits / 8), kLine);
    zeros = scales + scale_bytes;
    mins = zeros + (has_zeros ? round_up(groups * kBlockN, kLine) : 0);
    block = mins + (has_mins ? scale_bytes : 0);
  }

  // Byte of code (n, k) within its block, n < 16; 4-bit codes: in the high half when high(k).
  int64_t code(int64_t n, int64_t at) const {
    const int64_t line = bits == 8 ? at / 4 : at / 8;
    return line * kLine + n * 4 + at % 4;
  }
  static bool high(int64_t at) { return at % 8 >= 4; }
};

}  // namespace radix::cpu::linear_layout
