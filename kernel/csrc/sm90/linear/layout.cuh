// The layout of a packed weight on Hopper (RK_LAYOUT_FRAGMENTS64): codes in the order in which a lane holds operand A
// of mma.sync.m16n8k16 and of wgmma (m64, A from registers), whose fragments are alike.
//
//   | codes  | [ceil(n / 64)][ceil(k / 64)] tiles of 64 rows x 64 k, kTileBytes each               |
//   | scales | [ceil(n / 64)][groups][64] of the scales' own dtype (uint8 for e8m0), as they came  |
//   | zeros  | [ceil(n / 64)][groups][64] uint8, where the weight has zero points                  |
//
// A tile is four strips of 16 rows, one after the other; a strip is what a warp multiplies. Lane 4 g + t of the warp
// holds, of step s (16 of k), registers a0 .. a3: a_j has row g + 8 (j % 2) and k 2 t + 8 (j / 2) in its low half, and
// k + 1 in its high half.
//
//   4 bits: strip [32 lanes][4 steps][one word]. Nibble j of a word is the low half of a_j, nibble j + 4 the high half:
//           a_j comes from (word >> 4 j) & 0x000f000f.
//   8 bits: strip [2 halves of the tile's k][32 lanes][2 steps][two words]. Word i of a step has a_2i and a_2i+1: bytes
//           low, low, high, high, so that a_2i+b comes from (word >> 8 b) & 0x00ff00ff.
//
// So a lane's 16 bytes are one access, and a strip's bytes of a tile, 512 or 1,024, are contiguous; the tiles of a row
// of tiles follow each other along k. Rows and k beyond the weight hold the code of zero (kZeroCode), and scales there
// are zero bytes: a product with padding is exactly 0 if x beyond k is read as 0. All three parts begin at multiples of
// 128 bytes if the weight does.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "radix_kernels/linear.h"

namespace radix::linear {

constexpr int kTileRows = 64, kTileK = 64;  // of a tile
constexpr int kStripRows = 16;              // of a strip
constexpr int kStepK = 16;                  // of a step, a product instruction's k
constexpr int kPackedAlignment = 128;       // of a packed weight, bytes

// What a code is.
enum class Code : int {
  u4,    // 0 .. 15, counted from 8 or from a stored zero point, 0 .. 16
  e2m1,  // a 4-bit float: sign, two bits of exponent, one of mantissa
  s8     // -128 .. 127
};

RK_HOST_DEVICE constexpr int code_bits(Code code) {
  return code == Code::s8 ? 8 : 4;
}
RK_HOST_DEVICE constexpr int strip_bytes(Code code) {
  return kStripRows * kTileK * code_bits(code) / 8;
}
RK_HOST_DEVICE constexpr int tile_bytes(Code code) {
  return kTileRows / kStripRows * strip_bytes(code);
}
// The code that stands in padding. Zero points do not change it: what it is multiplied by is 0.
RK_HOST_DEVICE constexpr uint32_t zero_code(Code code) {
  return code == Code::u4 ? 8 : 0;
}

// The first of a step's words within a tile, in words.
RK_HOST_DEVICE constexpr int step_word(Code code, int strip, int lane, int step) {
  return code_bits(code) == 4 ? (strip * 32 + lane) * 4 + step
                              : ((strip * 2 + step / 2) * 32 + lane) * 4 + step % 2 * 2;
}
// What the low half of register a_j is of, counted within the tile; the high half is of the next k.
struct CodePlace {
  int row, k;
};
RK_HOST_DEVICE constexpr CodePlace register_place(int strip, int lane, int step, int j) {
  return {strip * kStripRows + lane / 4 + 8 * (j % 2), step * kStepK + lane % 4 * 2 + 8 * (j / 2)};
}

// The parts of a packed weight.
struct Layout {
  Code code;
  int64_t n, k;
  int group;        // inputs that share a scale; of whole rows, k in whole tiles
  int64_t groups;   // of a row
  int scale_bytes;  // of a scale
  int64_t row_tiles, k_tiles;
  int64_t scales, zeros, bytes;  // where scales and zeros begin, and the end; zeros: 0 without any

  explicit Layout(const rk_packed_desc& desc)
      : code(desc.kind == RK_WEIGHT_INT8    ? Code::s8
             : desc.kind == RK_WEIGHT_MXFP4 ? Code::e2m1
                                            : Code::u4),
        n(desc.n),
        k(desc.k),
        scale_bytes(desc.scale_dtype.bits / 8),
        row_tiles((desc.n + kTileRows - 1) / kTileRows),
        k_tiles((desc.k + kTileK - 1) / kTileK) {
    group = desc.group ? static_cast<int>(desc.group) : static_cast<int>(k_tiles * kTileK);
    groups = (k + group - 1) / group;
    scales = row_tiles * k_tiles * tile_bytes(code);
    const int64_t end = scales + row_tiles * groups * kTileRows * scale_bytes;
    zeros = desc.zeros ? end : 0;
    bytes = desc.zeros ? end + row_tiles * groups * kTileRows : end;
  }

  // Which scale or zero point, counted from the first, row `row` has in group `of`.
  RK_HOST_DEVICE static int64_t scale_index(int64_t row, int64_t of, int64_t groups) {
    return (row / kTileRows * groups + of) * kTileRows + row % kTileRows;
  }
};

}  // namespace radix::linear
