// The layout of a packed weight on Hopper (RK_LAYOUT_FRAGMENTS64): codes in the order in which a lane holds operand A
// of mma.sync.m16n8k16 and of wgmma (m64, A from registers), whose fragments are alike.
//
//   | codes  | [ceil(n / 64)][ceil(k / 64)] tiles of 64 rows x 64 k, kTileBytes each               |
//   | scales | [ceil(n / 64)][groups][64] of the scales' own dtype, as they came; e2m1: below      |
//   | zeros  | [ceil(n / 64)][groups][64] uint8, where the weight has zero points                  |
//
// A tile is four strips of 16 rows, one after the other; a strip is what a warp multiplies. Lane 4 g + t of the warp
// holds, of step s (16 of k), registers a0 .. a3: a_j has row g + 8 (j % 2) and k 2 t + 8 (j / 2) in its low half, and
// k + 1 in its high half.
//
//   u4:     strip [32 lanes][4 steps][one word]. Nibble j of a word is the low half of a_j, nibble j + 4 the high half:
//           a_j comes from (word >> 4 j) & 0x000f000f.
//   e2m1:   the same, but the two words of steps 2 i and 2 i + 1 share their 16 codes' bits, so that sign, exponent and
//           mantissa come to their places in bf16 at once (class E2m1Pair). The scales of a row's two groups in a tile
//           are one number of 16 bits, e8m0 twice, [ceil(n / 64)][ceil(k / 64)][4 strips][8][2]: rows g and g + 8 of
//           a strip beside each other, so that a lane has its four of a tile in one word.
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

// The codes of two steps of a lane, e2m1, in two words. Register i = 4 (step % 2) + j of the two steps, as bf16 has it
// but for the exponent's distance, is (word <<< 2 i) & kMask, with `word` the first one, the second one, or one made of
// bits that both have left, by i % 3: three times four bits fit into 16 so, eight times into 32.
class E2m1Pair {
 public:
  static constexpr uint32_t kSign = 0x80008000, kSize = 0x01c001c0, kMask = kSign | kSize;

  RK_HOST_DEVICE E2m1Pair(uint32_t first, uint32_t second) : words_{first, second, merged(first, second)} {}

  // What register i is (word <<< 2 i) & kMask of.
  RK_HOST_DEVICE uint32_t source(int i) const { return words_[i % 3]; }
  // A rotation to the left; up to 6 bits nothing of kMask comes around.
  RK_HOST_DEVICE static constexpr uint32_t rotated(uint32_t word, int bits) {
    return bits <= 6 ? word << bits : word << bits | word >> (32 - bits);
  }

  // From and to words with register j of a step in nibbles j and j + 4, as u4 has them.
  RK_HOST_DEVICE static E2m1Pair of_nibbles(const uint32_t (&steps)[2]) {
    uint32_t words[3] = {};
    for (int i = 0; i < 8; i++) {
      const uint32_t codes = steps[i / 4] >> (i % 4 * 4), bits = (codes & 0x00070007) << 6 | (codes & 0x00080008) << 12;
      words[i % 3] |= i == 0 ? bits : bits >> (2 * i) | bits << (32 - 2 * i);
    }
    return {words[0] | (words[2] & kOfFirst), words[1] | (words[2] & ~kOfFirst)};
  }
  RK_HOST_DEVICE uint32_t nibbles(int step) const {
    uint32_t codes = 0;
    for (int j = 0; j < 4; j++) {
      const uint32_t bits = rotated(source(step * 4 + j), 2 * (step * 4 + j));
      codes |= ((bits & kSize) >> 6 | (bits & kSign) >> 12) << (4 * j);
    }
    return codes;
  }
  RK_HOST_DEVICE uint32_t word(int step) const { return words_[step]; }

 private:
  // The bits that registers 0, 3 and 6 leave of the first word; 1, 4 and 7 leave others of the second.
  static constexpr uint32_t kOfFirst = 0x60306030;

  // (first & kOfFirst) | (second & ~kOfFirst)
  RK_HOST_DEVICE static uint32_t merged(uint32_t first, uint32_t second) {
#ifdef __CUDA_ARCH__
    uint32_t d;  // one instruction, of which the compiler would make two
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(d) : "r"(first), "r"(second), "n"(kOfFirst));
    return d;
#else
    return (first & kOfFirst) | (second & ~kOfFirst);
#endif
  }

  uint32_t words_[3];
};

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
  int64_t numbers;  // scales of a row as they are stored: one a group, or (e2m1) one a tile of k
  int scale_bytes;  // of one of these
  int64_t row_tiles, k_tiles;
  int64_t scales, zeros, bytes;  // where scales and zeros begin, and the end; zeros: 0 without any

  explicit Layout(const rk_packed_desc& desc)
      : code(desc.kind == RK_WEIGHT_INT8    ? Code::s8
             : desc.kind == RK_WEIGHT_MXFP4 ? Code::e2m1
                                            : Code::u4),
        n(desc.n),
        k(desc.k),
        scale_bytes(code == Code::e2m1 ? 2 : desc.scale_dtype.bits / 8),
        row_tiles((desc.n + kTileRows - 1) / kTileRows),
        k_tiles((desc.k + kTileK - 1) / kTileK) {
    group = desc.group ? static_cast<int>(desc.group) : static_cast<int>(k_tiles * kTileK);
    groups = (k + group - 1) / group;
    numbers = code == Code::e2m1 ? k_tiles : groups;
    scales = row_tiles * k_tiles * tile_bytes(code);
    const int64_t end = scales + row_tiles * numbers * kTileRows * scale_bytes;
    zeros = desc.zeros ? end : 0;
    bytes = desc.zeros ? end + row_tiles * groups * kTileRows : end;
  }

  // Which scale or zero point, counted from the first, row `row` has in group `of`. e2m1: which byte.
  RK_HOST_DEVICE int64_t scale_index(int64_t row, int64_t of) const {
    const int64_t row_tile = row / kTileRows, in_tile = row % kTileRows;
    if (code != Code::e2m1) return (row_tile * groups + of) * kTileRows + in_tile;
    const int64_t place = in_tile / kStripRows * kStripRows + row % 8 * 2 + row % kStripRows / 8;
    return ((row_tile * k_tiles + of / 2) * kTileRows + place) * 2 + of % 2;
  }
};

}  // namespace radix::linear
