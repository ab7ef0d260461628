// The product with weights in super-blocks on vector registers, any ISA level, for up to 4 rows x kCodeBlocks packed
// blocks.
//
// Within a super-block everything is an integer, as x has one scale there: the sums of codes times the small scales of
// their groups, and the sums of x times the small minima. Then sum += the first * (scale * x's scale) and sum += the
// second * (minimum * x's scale), super-blocks ascending: what a row's sum is depends on neither the other rows nor the
// blocks beside it.
#pragma once

#include "cpu/linear/dots16.h"
#include "cpu/linear/kernel_codes.h"

namespace radix::cpu::RK_ISA {

using linear_layout::SuperBlocks;

// Runs of codes: inputs that lie together.
template <int Bits>
struct CodeRun {
  static_assert(Bits >= 4 && Bits <= 6);
  static constexpr int kInputs = Bits == 6 ? 16 : 32;  // also those of a group
  static constexpr int kLines = kInputs / 8;           // of low bits
  static constexpr int kBytes = (kLines + (Bits > 4 ? 1 : 0)) * kLine;
  static constexpr int kGroups = SuperBlocks::kInputs / kInputs;  // of a super-block
};

// x in int8, and what the kernels want to know of it.
struct StagedSupers {
  StagedX x;           // its `scales` are [m][super-blocks]; no sums
  int16_t* sums;       // [m][groups], of codes
  int32_t* beginning;  // [m][groups] of 6-bit codes: begin_word() of what their zero takes from a sum
};

// Inputs 8 Line .. 8 Line + 7 of a run, and those behind them: acc += codes * x. `fold` is called where acc is full.
template <int Bits, int Line, int R, int B, class Fold>
inline void add_lines(const uint8_t* const (&run)[B], const int8_t* const (&x)[R], const Bytes64 (&high)[B],
                      Ints16 (&acc)[R][B], const Fold& fold) {
  Bytes64 first[B], second[B];
  for (int b = 0; b < B; b++) {
    const Bytes64 line = load_bytes(run[b] + Line * kLine);
    first[b] = whole_codes<Bits, 2 * Line>(low_nibbles(line), high[b]);
    second[b] = whole_codes<Bits, 2 * Line + 1>(high_nibbles(line), high[b]);
  }
  for (int r = 0; r < R; r++) {
    int32_t quad[2];
    std::memcpy(quad, x[r] + 8 * Line, sizeof quad);
    for (int b = 0; b < B; b++) {
      add_dots(acc[r][b], first[b], quad[0]);
      add_dots(acc[r][b], second[b], quad[1]);
    }
  }
  constexpr int kLines = CodeRun<Bits>::kLines;
  constexpr bool kFull = kDotsInPairs && (Line + 1) * 2 % most_dots(Bits) == 0 && Line + 1 < kLines;
  if constexpr (kFull) fold();
  if constexpr (Line + 1 < kLines) add_lines<Bits, Line + 1>(run, x, high, acc, fold);
}

// The sums of one super-block: of codes times small scales, and of x times small minima.
template <int Bits, int R, int B>
struct SuperSums {
  Ints16 codes[R][B], minima[R][B];

  void clear() {
    for (int r = 0; r < R; r++)
      for (int b = 0; b < B; b++) codes[r][b] = minima[r][b] = no_ints();
  }

  // Group g. w: the super-blocks of B neighbouring packed blocks. x: its inputs. `beginning` as StagedSupers has it.
  void add_group(const SuperBlocks& q, const uint8_t* const (&w)[B], int g, const int8_t* const (&x)[R],
                 const int32_t (&beginning)[R]) {
    using Run = CodeRun<Bits>;
    const uint8_t* run[B];
    Bytes64 high[B];
    SmallScales scales[B];
    for (int b = 0; b < B; b++) {
      run[b] = w[b] + g * Run::kBytes;
      if constexpr (Bits > 4) high[b] = load_bytes(run[b] + Run::kLines * kLine);
      scales[b] = load_small_scales(w[b] + q.sub_scales + g * kBlockN);
    }
    Ints16 acc[R][B];
    for (int r = 0; r < R; r++)
      for (int b = 0; b < B; b++) acc[r][b] = begin_dots(beginning[r]);
    const auto fold = [&] {
      for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) {
          add_scaled(codes[r][b], acc[r][b], scales[b]);
          acc[r][b] = no_ints();
        }
    };
    add_lines<Bits, 0>(run, x, high, acc, fold);
    for (int r = 0; r < R; r++)
      for (int b = 0; b < B; b++) {
        add_scaled(codes[r][b], acc[r][b], scales[b]);
        if constexpr (Bits == 6) add_beginning(codes[r][b], beginning[r], scales[b]);
      }
  }

  // Groups g and g + 1; x_sums: those of x, [R] rows of groups.
  void add_minima_of(const SuperBlocks& q, const uint8_t* const (&w)[B], int g, const int16_t* const (&x_sums)[R]) {
    for (int b = 0; b < B; b++) {
      const SmallMinima small = load_small_minima(w[b] + q.sub_mins + g * kBlockN);
      for (int r = 0; r < R; r++) {
        int32_t pair;
        std::memcpy(&pair, x_sums[r] + g, sizeof pair);
        RK_ISA::add_minima(minima[r][b], small, pair);
      }
    }
  }
};

// sum += integers * (number of a super-block * x's scale)
inline void add_integers(Lanes16& sum, const Ints16& integers, const Lanes16& number, float x_scale) {
  const Lanes16 values = to_lanes(integers), factor = times(number, x_scale);
  for (int i = 0; i < Lanes16::kParts; i++) sum.part[i] = fma(values.part[i], factor.part[i], sum.part[i]);
}

template <int Bits, int R, int B>
inline void super_tile(const SuperBlocks& q, const StagedSupers& staged, int64_t m, const uint8_t* w, float* sums) {
  using Run = CodeRun<Bits>;
  const int8_t* x[R];
  for (int r = 0; r < R; r++) x[r] = reinterpret_cast<const int8_t*>(staged.x.at(m + r, 0));
  Lanes16 total[R][B];
  clear(total);
  for (int64_t s = 0; s < q.supers; s++) {
    const uint8_t* super[B];
    const int16_t* x_sums[R];
    for (int b = 0; b < B; b++) super[b] = w + b * q.block + s * q.super;
    for (int r = 0; r < R; r++) x_sums[r] = staged.sums + (m + r) * q.groups + s * Run::kGroups;
    using namespace linear_layout;
    const int64_t ahead = fetch_ahead(s * q.super, q.block, B, kFetchDistance);
    SuperSums<Bits, R, B> found;
    found.clear();
    for (int g = 0; g < Run::kGroups; g++) {
      for (int b = 0; b < B; b++)
        for (int at = 0; at < Run::kBytes; at += kLine)
          __builtin_prefetch(super[b] + ahead + g * Run::kBytes + at, 0, 3);
      int32_t beginning[R] = {};
      if constexpr (Bits == 6)
        for (int r = 0; r < R; r++) beginning[r] = staged.beginning[(m + r) * q.groups + s * Run::kGroups + g];
      found.add_group(q, super, g, x, beginning);
      for (int r = 0; r < R; r++) x[r] += Run::kInputs;
      if (q.has_mins && g % 2 == 1) found.add_minima_of(q, super, g - 1, x_sums);
    }
    for (int b = 0; b < B; b++) {
      const Lanes16 scale = load_scales(super[b] + q.scales, 0, q.scale_type);
      for (int r = 0; r < R; r++)
        add_integers(total[r][b], found.codes[r][b], scale, staged.x.scales[(m + r) * q.supers + s]);
      if (!q.has_mins) continue;
      const Lanes16 min = load_scales(super[b] + q.mins, 0, q.scale_type);
      for (int r = 0; r < R; r++)
        add_integers(total[r][b], found.minima[r][b], min, staged.x.scales[(m + r) * q.supers + s]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) total[r][b].store_line(sums + (r * kCodeBlocks + b) * kBlockN);
}

template <int Bits>
struct SupersOnVectors : VectorProduct {
  static constexpr int kBlocks = kCodeBlocks;
  const SuperBlocks& q;
  const StagedSupers& x;
  SupersOnVectors(const SuperBlocks& layout, const StagedSupers& staged) : q(layout), x(staged) {}

  template <int R>
  void blocks(int64_t m, const uint8_t* w, int count, float* sums) const {
    if constexpr (kBlocks > 1) {
      if (count == kBlocks) return super_tile<Bits, R, kBlocks>(q, x, m, w, sums);
    }
    for (int b = 0; b < count; b++) super_tile<Bits, R, 1>(q, x, m, w + b * q.block, sums + b * kBlockN);
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
