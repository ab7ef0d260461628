// The product with weights in super-blocks on AMX tiles: the codes of a super-block become bytes once for all rows, a
// pass of 32 rows meets its groups one after the other, and their sums stay integers in L1 until the super-block ends.
#pragma once

#include "cpu/tiles.h"

#if RK_HAS_PRODUCT_TILES

#include "cpu/linear/kernel_amx.h"
#include "cpu/linear/kernel_supers.h"

namespace radix::cpu::RK_ISA {

// A super-block as lines of quads16, a run after the other.
template <int Bits, int Line = 0>
inline void expand_run(const uint8_t* run, const Bytes64& high, uint8_t* to) {
  const Bytes64 line = load_bytes(run + Line * kLine);
  _mm512_store_si512(to + 2 * Line * kLine, whole_codes<Bits, 2 * Line>(low_nibbles(line), high).v);
  _mm512_store_si512(to + (2 * Line + 1) * kLine, whole_codes<Bits, 2 * Line + 1>(high_nibbles(line), high).v);
  if constexpr (Line + 1 < CodeRun<Bits>::kLines) expand_run<Bits, Line + 1>(run, high, to);
}
template <int Bits>
inline void expand_super(const uint8_t* super, uint8_t* to) {
  using Run = CodeRun<Bits>;
  for (int g = 0; g < Run::kGroups; g++) {
    const uint8_t* run = super + g * Run::kBytes;
    const Bytes64 high = Bits > 4 ? load_bytes(run + Run::kLines * kLine) : Bytes64{_mm512_setzero_si512()};
    expand_run<Bits>(run, high, to + g * Run::kInputs * kBlockN);
  }
}

template <int Bits>
struct SupersAmx : AmxProduct {
  using Run = CodeRun<Bits>;
  static constexpr int64_t kRowWords = kBlocks * kBlockN;  // sums of a row
  static constexpr int64_t kSuperBytes = SuperBlocks::kInputs * kBlockN;
  const SuperBlocks& q;
  const StagedSupers& staged;
  SupersAmx(const SuperBlocks& layout, const StagedSupers& x) : AmxProduct(x.x), q(layout), staged(x) {}

  AmxScope scope(int64_t m) const { return {static_cast<int>(lesser(m, kTileRows)), Run::kInputs}; }
  bool many(int) const { return false; }
  template <class Ends>
  void tile_many(int64_t, int, const TaskBlocks&, float*, float*, const Ends&) const {}

  // Rows of a pass.
  struct Pass {
    int64_t m;  // the first
    int rows;
    int number, of;
  };

  // codes: [2] expanded super-blocks.
  template <class Ends>
  void tile(int64_t m, int rows, const uint8_t* w, int count, const uint8_t* next, float* sums,
            const Ends& ends) const {
    alignas(64) uint8_t codes[kBlocks * kSuperBytes];
    const WeightStream stream{w, next, q.block, count == 2 ? q.block : 0};
    const int passes = (rows + kPassRows - 1) / kPassRows;
    for (int64_t s = 0; s < q.supers; s++) {
      for (int b = 0; b < count; b++) expand_super<Bits>(w + b * q.block + s * q.super, codes + b * kSuperBytes);
      for (int number = 0; number < passes; number++) {
        const int r = number * kPassRows;
        const Pass pass{m + r, static_cast<int>(lesser(kPassRows, rows - r)), number, passes};
        if (s == 0) {
          ends.fetch(r, pass.rows);
          ends.begin(r, pass.rows);
        }
        add_super(pass, stream, count, s, codes, sums + r * kRowWords);
        if (s + 1 == q.supers) ends.finish(r, pass.rows, sums + r * kRowWords);
      }
    }
  }

  // sums [rows][2][16] (+)= super-block s of both blocks.
  void add_super(const Pass& pass, const WeightStream& stream, int count, int64_t s, const uint8_t* codes,
                 float* sums) const {
    alignas(64) int32_t words[kPassRows * kRowWords], integers[kPassRows * kRowWords];
    const char* first = reinterpret_cast<const char*>(codes);
    const int64_t lines = q.super / kLine;
    for (int g = 0; g < Run::kGroups; g++) {
      const int64_t k = s * SuperBlocks::kInputs + g * Run::kInputs, at = g * Run::kInputs * kBlockN;
      Panel panel{first + at, first + at + (count == 2 ? kSuperBytes : 0), 0, 1};
      const int64_t begin = lines * g / Run::kGroups, end = lines * (g + 1) / Run::kGroups;
      stream.aim(panel, s * q.super + begin * kLine, (end - begin) * kLine);
      multiply_group(pass, k, panel, words);
      for (int b = 0; b < count; b++)
        add_group(pass, stream.w + b * stream.second + s * q.super, b, s, g, words, integers);
    }
    for (int b = 0; b < count; b++) fold(pass, stream.w + b * stream.second + s * q.super, b, s, integers, sums);
  }

  void multiply_group(const Pass& pass, int64_t k, const Panel& panel, int32_t* words) const {
    const char* a = x.at(pass.m, k / kLine) + k % kLine;
    const Fetch fetch(panel, pass.number, pass.of);
    char* to = reinterpret_cast<char*>(words);
    if (pass.of > 1) {
      multiply_pass<Int8Tiles, Readers::kSome>(a, x.row16, pass.rows, panel, fetch, to, false, Nothing());
    } else {
      multiply_pass<Int8Tiles, Readers::kPass>(a, x.row16, pass.rows, panel, fetch, to, false, Nothing());
    }
  }

  // integers [rows][2][16] (+)= the words of group g times its small scales.
  void add_group(const Pass& pass, const uint8_t* super, int b, int64_t s, int g, const int32_t* words,
                 int32_t* integers) const {
    const SmallScales scales = load_small_scales(super + q.sub_scales + g * kBlockN);
    for (int r = 0; r < pass.rows; r++) {
      const int64_t at = r * kRowWords + b * kBlockN;
      Ints16 dots{_mm512_load_si512(words + at)};
      if constexpr (Bits == 6) {
        const int64_t group = (pass.m + r) * q.groups + s * Run::kGroups + g;
        add(dots, begin_dots(staged.beginning[group]));
      }
      Ints16 sum = no_ints();
      if (g > 0) sum.v = _mm512_load_si512(integers + at);
      add_scaled(sum, dots, scales);
      _mm512_store_si512(integers + at, sum.v);
    }
  }

  // sums [rows][2][16] (+)= the integers of super-block s, and its minima, times its numbers.
  void fold(const Pass& pass, const uint8_t* super, int b, int64_t s, const int32_t* integers, float* sums) const {
    const Lanes16 scale = load_scales(super + q.scales, 0, q.scale_type);
    for (int r = 0; r < pass.rows; r++) {
      const int64_t at = r * kRowWords + b * kBlockN, row = pass.m + r;
      const float x_scale = x.scales[row * q.supers + s];
      Lanes16 total;
      total.clear();
      if (s > 0) total.load_line(sums + at);
      add_integers(total, {_mm512_load_si512(integers + at)}, scale, x_scale);
      if (q.has_mins)
        add_integers(total, minima_of(super, row, s), load_scales(super + q.mins, 0, q.scale_type), x_scale);
      total.store_line(sums + at);
    }
  }

  Ints16 minima_of(const uint8_t* super, int64_t row, int64_t s) const {
    const int16_t* x_sums = staged.sums + row * q.groups + s * Run::kGroups;
    Ints16 found = no_ints();
    for (int g = 0; g < Run::kGroups; g += 2) {
      int32_t pair;
      std::memcpy(&pair, x_sums + g, sizeof pair);
      add_minima(found, load_small_minima(super + q.sub_mins + g * kBlockN), pair);
    }
    return found;
  }
};

}  // namespace radix::cpu::RK_ISA

#endif
