// A warp's stream of codes, scales and zero points: from device memory straight into registers, some rounds ahead.
#pragma once

#include "gpu/device/element.h"
#include "sm90/linear/mixed_mma_tile.cuh"
#include "sm90/linear/widen.cuh"

namespace radix::linear {

// 16 bytes that are read once; `to` stays as it is unless `valid`.
__device__ inline void load_codes(uint4& to, const char* from, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
      : "l"(from), "r"(int(valid)));
}
// The same, and 4 bytes from elsewhere.
__device__ inline void load_tile(uint4& codes, uint32_t& scales, const char* from, const char* scales_from,
                                 bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %7, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%5];\n"
      "@p ld.global.nc.u32 %4, [%6];\n"
      "}"
      : "+r"(codes.x), "+r"(codes.y), "+r"(codes.z), "+r"(codes.w), "+r"(scales)
      : "l"(from), "l"(scales_from), "r"(int(valid)));
}
// The kBytes bytes at `from` and at the 8th number behind it; `to` stays as it is unless `valid`.
template <int kBytes>
__device__ inline void load_numbers(uint32_t (&to)[2], const char* from, bool valid) {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4);
  if constexpr (kBytes == 1) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %3, 0;\n"
        "@p ld.global.nc.u8 %0, [%2];\n"
        "@p ld.global.nc.u8 %1, [%2 + 8];\n"
        "}"
        : "+r"(to[0]), "+r"(to[1])
        : "l"(from), "r"(int(valid)));
  } else if constexpr (kBytes == 2) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %3, 0;\n"
        "@p ld.global.nc.u16 %0, [%2];\n"
        "@p ld.global.nc.u16 %1, [%2 + 16];\n"
        "}"
        : "+r"(to[0]), "+r"(to[1])
        : "l"(from), "r"(int(valid)));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %3, 0;\n"
        "@p ld.global.nc.u32 %0, [%2];\n"
        "@p ld.global.nc.u32 %1, [%2 + 32];\n"
        "}"
        : "+r"(to[0]), "+r"(to[1])
        : "l"(from), "r"(int(valid)));
  }
}

// What a lane holds of one round: its pieces of the codes of each strip, and of rows g and g + 8 the bits of scales and
// zero points (8 where the weight has none). Scales of e2m1 are those of a tile: row g's two groups, then row g + 8's.
template <class Tile>
struct MixedRound {
  uint4 codes[Tile::kUnits][Tile::kRoundPieces];
  uint32_t scales[Tile::kUnits][Tile::kRoundScales][Tile::kScaleWords];
  uint32_t zeros[Tile::kUnits][Tile::kRoundGroups][2];  // of u4

  __device__ void clear() {
#pragma unroll
    for (int u = 0; u < Tile::kUnits; u++) {
#pragma unroll
      for (int i = 0; i < Tile::kRoundPieces; i++) codes[u][i] = {};
#pragma unroll
      for (int i = 0; i < Tile::kRoundScales * Tile::kScaleWords; i++)
        scales[u][i / Tile::kScaleWords][i % Tile::kScaleWords] = 0;
#pragma unroll
      for (int i = 0; i < Tile::kRoundGroups * 2; i++) zeros[u][i / 2][i % 2] = 8;
    }
  }

  // Of half tile `half` of the round, 32 of k, the words of step `step` of its two.
  __device__ void words(int unit, int half, int step, uint32_t (&to)[kStepWords<Tile::kCode>]) const {
    const uint4& piece = codes[unit][Tile::kTilePieces == 1 ? half / 2 : half];
    if constexpr (Tile::kTilePieces == 1) {
      to[0] = half % 2 == 0 ? (step == 0 ? piece.x : piece.y) : (step == 0 ? piece.z : piece.w);
    } else {
      to[0] = step == 0 ? piece.x : piece.z;
      to[1] = step == 0 ? piece.y : piece.w;
    }
  }
  // The bits of all scales of some tiles of e2m1.
  __device__ uint32_t any_scales(int first, int count) const {
    uint32_t all = 0;
#pragma unroll
    for (int u = 0; u < Tile::kUnits; u++)
#pragma unroll
      for (int i = first; i < first + count; i++) all |= scales[u][i][0];
    return all;
  }
  __device__ float scale(const MixedForm& p, int unit, int group, int i) const {
    if constexpr (Tile::kSharedScales) return power_of_two(e2m1_power(scales[unit][group / 2][0], i, group % 2));
    const uint32_t bits = scales[unit][group][Tile::kScaleWords - 2 + i];
    const float wide = __uint_as_float(p.scale_type == DType::bf16 ? bits << 16 : bits);
    const float from_half = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    return p.scale_type == DType::f16 ? from_half : wide;
  }
};

// Where a warp is on its way through its rounds: rounds i of its tiles of rows have kRound tiles of k from
// (i * kKWarps + k_warp) * kRound on.
template <class Tile, class Walk>
class WeightStream {
 public:
  __device__ WeightStream(const Walk& walk, int row_warp, int k_warp)
      : p_(walk.form()), walk_(walk), row_warp_(row_warp), k_warp_(k_warp) {
    begin(blockIdx.x);
  }

  // The next round, also across the end of a tile of rows; past the last one, nothing. Scales beyond k are 0, those of
  // e2m1 what they were: codes there are multiplied by zeros.
  __device__ void load(MixedRound<Tile>& to) {
    if constexpr (Tile::kSharedScales) {
#pragma unroll
      for (int i = 0; i < Tile::kRound; i++) load_piece(to, i);
      advance();
    } else {
      load_round(to);
    }
  }
  // Of e2m1 tile `piece` of the next round's alone. After all of them: advance().
  __device__ void load_piece(MixedRound<Tile>& to, int piece) const {
#pragma unroll
    for (int u = 0; u < Tile::kUnits; u++)
      load_tile(to.codes[u][piece], to.scales[u][piece][0], codes_[u] + piece * tile_bytes(Tile::kCode),
                scales_[u] + piece * kScaleStep, piece < left_[u]);
  }
  __device__ void advance() {
    k_tile_ += Tile::kStageTiles;
    if (k_tile_ - k_warp_ * Tile::kRound >= p_.k_tiles) return begin(tile_ + gridDim.x);
    const int numbers = Tile::kKWarps * Tile::kRoundGroups * group_step();
#pragma unroll
    for (int u = 0; u < Tile::kUnits; u++) {
      codes_[u] += Tile::kStageTiles * tile_bytes(Tile::kCode);
      if constexpr (Tile::kSharedScales) {
        scales_[u] += Tile::kStageTiles * kScaleStep;
        left_[u] -= Tile::kStageTiles;
      } else {
        number_[u] += numbers;
      }
    }
  }

 private:
  static constexpr int kScaleStep = kTileRows * 2;  // bytes of e2m1's scales, from one tile of k to the next

  __device__ void load_round(MixedRound<Tile>& to) {
    if (tile_ >= walk_.tiles()) return;
    const int tiles_left = p_.k_tiles - k_tile_;
    const int groups_left = by_rows() ? Tile::kRoundGroups : p_.numbers - group();
#pragma unroll
    for (int u = 0; u < Tile::kUnits; u++) {
      if (!has_strip_[u]) continue;
#pragma unroll
      for (int i = 0; i < Tile::kRoundPieces; i++)
        load_codes(to.codes[u][i],
                   codes_[u] + i / Tile::kTilePieces * tile_bytes(Tile::kCode) + i % Tile::kTilePieces * 512,
                   i / Tile::kTilePieces < tiles_left);
      p_.scale_bytes == 2 ? load_scales<2>(to, u, groups_left) : load_scales<4>(to, u, groups_left);
      if (Tile::kCode == Code::u4 && p_.zeros) load_zeros(to, u, groups_left);
    }
    advance();
  }

  // Whether all groups have the same numbers.
  __device__ bool by_rows() const { return Tile::kGroup == kWholeRows && p_.by_rows; }
  // The first group of the round.
  __device__ int group() const {
    return by_rows() ? 0 : static_cast<int>(static_cast<unsigned>(k_tile_) * kTileK / Tile::kGroup);
  }
  // Numbers from one group to the next.
  __device__ int group_step() const { return by_rows() ? 0 : kTileRows; }

  // Of the lane's strip u, the first number among scales or zero points of `bytes` each.
  __device__ const char* number(const char* all, int u, int bytes) const {
    if constexpr (Walk::kStacked) all += walk_.offset(weight_);
    return all + int64_t{number_[u]} * bytes;
  }
  template <int kBytes>
  __device__ void load_scales(MixedRound<Tile>& to, int u, int groups_left) const {
    const char* from = number(p_.scales, u, kBytes);
#pragma unroll
    for (int i = 0; i < Tile::kRoundGroups; i++) {
      to.scales[u][i][0] = to.scales[u][i][1] = 0;
      load_numbers<kBytes>(to.scales[u][i], from + i * group_step() * kBytes, i < groups_left);
    }
  }
  __device__ void load_zeros(MixedRound<Tile>& to, int u, int groups_left) const {
    const char* from = number(p_.zeros, u, 1);
#pragma unroll
    for (int i = 0; i < Tile::kRoundGroups; i++)
      load_numbers<1>(to.zeros[u][i], from + i * group_step(), i < groups_left);
  }

  __device__ void begin(int tile) {
    tile_ = tile;
    k_tile_ = k_warp_ * Tile::kRound;
#pragma unroll
    for (int u = 0; u < Tile::kUnits; u++) left_[u] = 0;
    if (tile >= walk_.tiles()) return;
    int64_t offset = 0;
    if constexpr (Walk::kStacked) {
      weight_ = walk_.weight(tile);
      offset = walk_.offset(weight_);
    }
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < Tile::kUnits; u++) {
      const int strip = walk_.strip_of(tile, row_warp_ * Tile::kUnits + u);
      has_strip_[u] = strip >= 0;
      const int row_tile = max(strip, 0) / 4;
      const int64_t tile_at = int64_t{row_tile} * p_.k_tiles + k_tile_;
      codes_[u] =
          p_.codes + offset + tile_at * tile_bytes(Tile::kCode) + strip % 4 * strip_bytes(Tile::kCode) + lane * 16;
      if constexpr (Tile::kSharedScales) {
        scales_[u] = p_.scales + offset + tile_at * kScaleStep + strip % 4 * (kScaleStep / 4) + lane / 4 * 4;
        if (has_strip_[u]) left_[u] = p_.k_tiles - k_tile_;
      } else {
        number_[u] = (row_tile * p_.numbers + group()) * kTileRows + strip % 4 * kStripRows + lane / 4;
      }
    }
  }

  const MixedForm& p_;
  const Walk& walk_;
  const int row_warp_, k_warp_;
  int tile_, k_tile_;  // of the next round
  bool has_strip_[Tile::kUnits];
  const char* codes_[Tile::kUnits];
  const char* scales_[Tile::kUnits];  // of e2m1
  int left_[Tile::kUnits];            // of e2m1, tiles of k that there are from the next round on
  int number_[Tile::kUnits];          // of row g in the round's first group, among all scales of the weight
  int weight_;                        // of the tile, where there are several
};

}  // namespace radix::linear
