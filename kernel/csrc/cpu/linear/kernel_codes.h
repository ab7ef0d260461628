// The product with quantized weights on vector registers, any ISA level, for up to 4 rows x kCodeBlocks packed blocks.
//
// Within a group of K the codes are summed alone: exactly, in int32, when x is quantized too; in float32 in ascending k
// otherwise. Then sum += (codes - zero * (sum of x)) * scale, groups ascending: what a row's sum is depends on neither
// the other rows nor the blocks beside it.
#pragma once

#include "cpu/linear/ints16.h"
#include "cpu/linear/problem.h"

namespace radix::cpu::RK_ISA {

using linear_layout::kLine;
using linear_layout::Quantized;

#if defined(__AVX512F__)
constexpr int kCodeBlocks = 4;  // 4 rows x 4 blocks of accumulators, 4 lines of codes
#else
constexpr int kCodeBlocks = 1;  // 4 rows x 1 block (two ymm)
#endif

// x as the kernels read it. `values`: int8 codes or float32; 64 bytes number c of row m are at `at(m, c)`.
struct StagedX {
  char* values;
  int64_t row16, row, chunk;  // steps in bytes: of 16 rows, of a row within them, of 64 bytes
  float* scales;              // [m][groups], of int8 codes
  void* sums;                 // [m][groups] of the group's codes (int32) or values (float)

  char* at(int64_t m, int64_t c) const { return values + (m / 16) * row16 + (m % 16) * row + c * chunk; }
};

inline Lanes16 load_scales(const uint8_t* p, int64_t index, DType type) {
  Lanes16 r;
  switch (type) {
    case DType::f32: r.load_line(reinterpret_cast<const float*>(p) + index); break;
    case DType::f16: r.load_line(reinterpret_cast<const f16*>(p) + index); break;
    default: r.load_line(reinterpret_cast<const bf16*>(p) + index);
  }
  return r;
}

inline void add_scaled(float* sum, const Lanes16& values, const Lanes16& scale) {
  for (int i = 0; i < Lanes16::kParts; i++)
    store(sum + i * Vec::width, fma(values.part[i], scale.part[i], load(sum + i * Vec::width)));
}
inline Lanes16 times(const Lanes16& a, float b) {
  Lanes16 r;
  for (int i = 0; i < Lanes16::kParts; i++) r.part[i] = a.part[i] * set1(b);
  return r;
}

// The zero points of group g of a block, as integers.
inline Ints16 group_zeros(const Quantized& q, const uint8_t* block, int64_t g, int symmetric) {
  return q.has_zeros ? load_zeros(block + q.zeros + g * kBlockN) : set_ints(symmetric);
}

// What is still to be taken from sums of codes that signed_lanes() and nibble_lanes() made.
template <int Bits>
inline Lanes16 group_offsets(const Quantized& q, const uint8_t* block, int64_t g) {
  Lanes16 r = to_lanes(group_zeros(q, block, g, Bits == 8 ? 0 : kNibbleZero));
  for (Vec& part : r.part) part = part - set1(Bits == 8 ? 0 : kNibbleZero);
  return r;
}

// Sums of int8 x codes for one line of weights each: 4 k (8-bit codes) or 8 k.
template <int Bits, int R, int B>
inline void int_group(const Quantized& q, const uint8_t* w, int64_t block, const int8_t* const* x, int64_t k0,
                      Ints16 (&acc)[R][B]) {
  constexpr int kPerLine = 32 / Bits, kAhead = 4096;
  for (auto& row : acc)
    for (Ints16& a : row) a = no_ints();
  for (int64_t k = k0; k < k0 + q.group; k += kPerLine) {
    Bytes64 line[B];
    for (int b = 0; b < B; b++) {
      const uint8_t* p = w + b * block + k / kPerLine * kLine;
      __builtin_prefetch(p + kAhead, 0, 3);
      line[b] = load_bytes(p);
    }
    for (int r = 0; r < R; r++) {
      int32_t quad[2];
      std::memcpy(quad, x[r] + k, kPerLine);
      for (int b = 0; b < B; b++) {
        if constexpr (Bits == 8) {
          dot_signed(acc[r][b], line[b], quad[0]);
        } else {
          dot_small(acc[r][b], low_nibbles(line[b]), quad[0]);
          dot_small(acc[r][b], high_nibbles(line[b]), quad[1]);
        }
      }
    }
  }
}

template <int Bits, int R, int B>
inline void int_tile(const Quantized& q, const StagedX& x, int64_t m, const uint8_t* w, float* sums) {
  const int8_t* rows[R];
  for (int r = 0; r < R; r++) rows[r] = reinterpret_cast<const int8_t*>(x.at(m + r, 0));
  const auto* row_sums = static_cast<const int32_t*>(x.sums);
  std::memset(sums, 0, sizeof(float) * R * kCodeBlocks * kBlockN);
  for (int64_t g = 0; g < q.groups; g++) {
    Ints16 acc[R][B];
    int_group<Bits>(q, w, q.block, rows, g * q.group, acc);
    for (int b = 0; b < B; b++) {
      const uint8_t* block = w + b * q.block;
      const Lanes16 scale = load_scales(block + q.scales, g * kBlockN, q.scale_type);
      const Ints16 zero = group_zeros(q, block, g, Bits == 8 ? kSignedBias : kNibbleZero);
      for (int r = 0; r < R; r++) {
        const int64_t at = (m + r) * q.groups + g;
        add_scaled(sums + (r * kCodeBlocks + b) * kBlockN, corrected(acc[r][b], zero, row_sums[at]),
                   times(scale, x.scales[at]));
      }
    }
  }
}

// One k of float x: I is its place in the line.
template <int Bits, int I, int R, int B>
inline void float_step(const Bytes64 (&line)[B], const float* const* x, int64_t k, Lanes16 (&acc)[R][B]) {
  for (int b = 0; b < B; b++) {
    Lanes16 codes;
    if constexpr (Bits == 8) {
      codes = signed_lanes<I>(line[b]);
    } else {
      codes = nibble_lanes<(I % 4) * 2 + I / 4>(line[b]);
    }
    for (int r = 0; r < R; r++) acc[r][b].accumulate(x[r][k + I], codes);
  }
  if constexpr (I + 1 < 32 / Bits) float_step<Bits, I + 1>(line, x, k, acc);
}

template <int Bits, int R, int B>
inline void float_tile(const Quantized& q, const StagedX& x, int64_t m, const uint8_t* w, float* sums) {
  constexpr int kPerLine = 32 / Bits, kAhead = 4096;
  const float* rows[R];
  for (int r = 0; r < R; r++) rows[r] = reinterpret_cast<const float*>(x.at(m + r, 0));
  const auto* row_sums = static_cast<const float*>(x.sums);
  std::memset(sums, 0, sizeof(float) * R * kCodeBlocks * kBlockN);
  for (int64_t g = 0; g < q.groups; g++) {
    Lanes16 acc[R][B];
    for (auto& row : acc)
      for (Lanes16& a : row) a.clear();
    for (int64_t k = g * q.group; k < (g + 1) * q.group; k += kPerLine) {
      Bytes64 line[B];
      for (int b = 0; b < B; b++) {
        const uint8_t* p = w + b * q.block + k / kPerLine * kLine;
        __builtin_prefetch(p + kAhead, 0, 3);
        line[b] = load_bytes(p);
      }
      float_step<Bits, 0>(line, rows, k, acc);
    }
    for (int b = 0; b < B; b++) {
      const uint8_t* block = w + b * q.block;
      const Lanes16 scale = load_scales(block + q.scales, g * kBlockN, q.scale_type);
      const Lanes16 offset = group_offsets<Bits>(q, block, g);
      for (int r = 0; r < R; r++) {
        const Vec sum = set1(row_sums[(m + r) * q.groups + g]);
        for (int i = 0; i < Lanes16::kParts; i++) acc[r][b].part[i] = fnma(offset.part[i], sum, acc[r][b].part[i]);
        add_scaled(sums + (r * kCodeBlocks + b) * kBlockN, acc[r][b], scale);
      }
    }
  }
}

template <int Bits, bool Int8X>
struct CodesProduct : VectorProduct {
  static constexpr int kBlocks = kCodeBlocks;
  const Quantized& q;
  const StagedX& x;
  CodesProduct(const Quantized& layout, const StagedX& staged) : q(layout), x(staged) {}

  template <int R>
  void blocks(int64_t m, const uint8_t* w, int count, float* sums) const {
    if constexpr (kBlocks > 1) {
      if (count == kBlocks) return tile_of<R, kBlocks>(m, w, sums);
    }
    for (int b = 0; b < count; b++) {
      float one[R * kBlocks * kBlockN];
      tile_of<R, 1>(m, w + b * q.block, one);
      for (int r = 0; r < R; r++)
        std::memcpy(sums + (r * kBlocks + b) * kBlockN, one + r * kBlocks * kBlockN, kBlockN * sizeof(float));
    }
  }
  template <int R, int B>
  void tile_of(int64_t m, const uint8_t* w, float* sums) const {
    if constexpr (Int8X) {
      int_tile<Bits, R, B>(q, x, m, w, sums);
    } else {
      float_tile<Bits, R, B>(q, x, m, w, sums);
    }
  }
  void tile(int64_t m, int rows, const uint8_t* w, int count, float* sums) const {
    switch (rows) {
      case 4: return blocks<4>(m, w, count, sums);
      case 3: return blocks<3>(m, w, count, sums);
      case 2: return blocks<2>(m, w, count, sums);
      default: return blocks<1>(m, w, count, sums);
    }
  }
};

}  // namespace radix::cpu::RK_ISA
