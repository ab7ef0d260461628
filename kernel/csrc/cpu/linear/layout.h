// The packed weight layouts. A block is 16 outputs wide; N is padded to 16, K with zeros.
//
//   pairs16 (bfloat16)          [N/16][K/2][16][2]   one 64-byte line = 16 outputs x 2 consecutive k
//   lanes16 (float32, float16)  [N/16][K][16]        one line = 16 outputs of one k
//   quads16 (8-bit codes)       [N/16] x { [K/4][16][4], scales [groups][16], minima [groups][16] }
//                                                    one line = 16 outputs x 4 consecutive k
//   bytes16 (8-bit floats)      [N/16] x { [K/2][16][2], scales [groups][16] }
//                                                    one line = 16 outputs x 2 x 2 consecutive k
//   nibbles16 (4-bit codes)     [N/16] x { [K/8][16][4], scales [groups][16], zeros uint8 [groups][16],
//                                          or minima [groups][16] }
//                                                    one line = 16 outputs x 8 k: the quads16 line of k .. k + 3 in the
//                                                    low halves of its bytes, that of k + 4 .. k + 7 in the high ones
//   supers16 (4 to 6 bits)      [N/16][K/256] x { codes, sub-scales int8 [groups][16], sub-minima uint8
//                                                 [groups / 2][16][2], scales [16], minima [16] }
//                                                    codes are runs of 32 or (6 bits) 16 inputs: their low four bits
//                                                    as nibbles16, then one line of the bits above: byte n, k % 4 has
//                                                    those of k, k + 4, k + 8 ... from its lowest bits on
//
// A line of bytes16, widened to 16 bits, is two lines of pairs16.
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

// How far ahead of the codes that are read now others are fetched, in bytes.
constexpr int64_t kFetchDistance = 4096;

// How far ahead, in bytes, a stream fetches that is `offset` bytes into the codes of one of `blocks` neighbouring
// blocks read side by side: past the codes' end it goes on with those of the block that it reads next.
constexpr int64_t fetch_ahead(int64_t offset, int64_t code_bytes, int64_t block_bytes, int blocks, int64_t distance) {
  return offset + distance < code_bytes ? distance : distance + blocks * block_bytes - code_bytes;
}
// The same of blocks that hold nothing else.
constexpr int64_t fetch_ahead(int64_t offset, int64_t block_bytes, int blocks, int64_t distance) {
  return fetch_ahead(offset, block_bytes, block_bytes, blocks, distance);
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
  bool floats;       // codes are floats, not integers
  DType scale_type;  // of minima too; u8: powers of two
  int64_t k, kp;
  int64_t group;                       // inputs that share a scale; kp when a row has one
  int64_t groups;                      // of the padded row; the scales of padding are 0
  int64_t groups_k;                    // that hold inputs
  int64_t scales, zeros, mins, block;  // offsets of scales, zeros and minima, size of a block
  int64_t group_numbers;               // bytes of these that a group has, on average

  explicit Quantized(const rk_packed_desc& d)
      : bits(d.kind == RK_WEIGHT_INT8 || d.kind == RK_WEIGHT_W8A8 || d.kind == RK_WEIGHT_FP8 ? 8 : 4),
        int8_x(d.kind == RK_WEIGHT_W8A8 || d.kind == RK_WEIGHT_W4A8 || d.kind == RK_WEIGHT_MXFP4),
        has_zeros(d.zeros != 0),
        has_mins(d.mins != 0),
        floats(d.kind == RK_WEIGHT_MXFP4 || d.kind == RK_WEIGHT_FP8),
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
    group_numbers = (block - scales) / groups;
  }

  // fetch_ahead() of these blocks.
  int64_t ahead(int64_t offset, int blocks) const { return fetch_ahead(offset, scales, block, blocks, kFetchDistance); }

  // Byte of code (n, k) within its block, n < 16; 4-bit codes: in the high half when high(k).
  int64_t code(int64_t n, int64_t at) const {
    if (bits == 8 && floats) return at / 2 * (kLine / 2) + n * 2 + at % 2;
    const int64_t line = bits == 8 ? at / 4 : at / 8;
    return line * kLine + n * 4 + at % 4;
  }
  static bool high(int64_t at) { return at % 8 >= 4; }
};

// Where the parts of a weight in super-blocks lie: 16 outputs x 256 inputs, whose groups have small integers as scales,
// and as minima if any, which numbers of the super-block multiply. Offsets are in bytes, within a super-block.
struct SuperBlocks {
  static constexpr int64_t kInputs = 256;
  int bits;  // of a code; those of 6 bits stand for 0 with 32, the others with 0
  bool has_mins;
  DType scale_type;  // of minima too
  int64_t k, kp;
  int64_t group;       // inputs that share a sub-scale
  int64_t groups;      // of the padded row
  int64_t groups_k;    // that hold inputs
  int64_t supers;      // of the padded row
  int64_t run, lines;  // inputs that lie together, and the lines of their low bits
  int64_t run_bytes;
  int64_t sub_scales, sub_mins, scales, mins;
  int64_t super, block;  // sizes of a super-block and of all those of 16 outputs

  static bool holds(const rk_packed_desc& d) { return d.kind >= RK_WEIGHT_Q4_K && d.kind <= RK_WEIGHT_Q6_K; }

  explicit SuperBlocks(const rk_packed_desc& d)
      : bits(static_cast<int>(d.kind - RK_WEIGHT_Q4_K) + 4),
        has_mins(d.mins != 0),
        scale_type(dtype_of(d.scale_dtype)),
        k(d.k),
        kp(round_up(k, kInputs)),
        group(d.group) {
    groups = kp / group;
    groups_k = (k + group - 1) / group;
    supers = kp / kInputs;
    run = bits == 6 ? 16 : 32;
    lines = run / 8;
    run_bytes = (lines + (bits > 4 ? 1 : 0)) * kLine;
    const int64_t small = kInputs / group * kBlockN, large = kBlockN * (d.scale_dtype.bits / 8);
    sub_scales = kInputs / run * run_bytes;
    sub_mins = sub_scales + small;
    scales = sub_mins + (has_mins ? small : 0);
    mins = scales + large;
    super = round_up(mins + (has_mins ? large : 0), kLine);
    block = supers * super;
  }

  int zero() const { return bits == 6 ? 32 : 0; }
  // Where code (n, at) lies, n < 16, at < kInputs: the byte of its low four bits, in the high half when high(at); that
  // of the others, which are from bit high_shift(at) on.
  int64_t low_byte(int64_t n, int64_t at) const { return at / run * run_bytes + at % run / 8 * kLine + n * 4 + at % 4; }
  static bool high(int64_t at) { return at % 8 >= 4; }
  int64_t high_byte(int64_t n, int64_t at) const { return at / run * run_bytes + lines * kLine + n * 4 + at % 4; }
  int high_shift(int64_t at) const { return static_cast<int>(at % run / 4) * (bits - 4); }
  // Of group g of the super-block.
  int64_t sub_scale(int64_t n, int64_t g) const { return sub_scales + g * kBlockN + n; }
  int64_t sub_min(int64_t n, int64_t g) const { return sub_mins + g / 2 * 2 * kBlockN + n * 2 + g % 2; }
};

}  // namespace radix::cpu::linear_layout
