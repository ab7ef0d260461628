// The product of bf16 x, as it is, with quantized weights on AMX tiles: the values of a piece of k are
// rounded to bf16, in L1, once for all rows of a chunk, and meet them as dense weights do.
#pragma once

#include "cpu/tiles.h"

#if RK_HAS_PRODUCT_TILES

#include "cpu/linear/kernel_amx.h"
#include "cpu/linear/kernel_supers.h"

namespace radix::cpu::RK_ISA {

// A group's values are (codes + shift) * scale + offset, of which all but the last sum is exact where scales have few
// bits.
struct ValuesOf {
  Vec shift, scale, offset;

  // The values of codes of inputs k and k + 1, of 16 outputs each: a line of pairs16.
  void store_two(const Lanes16& even, const Lanes16& odd, uint8_t* to) const {
    const Vec first = fma(even.part[0] + shift, scale, offset), second = fma(odd.part[0] + shift, scale, offset);
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v));
    _mm512_store_si512(to, interleaved_halves(both));
  }
  // Of four inputs, a line of signed bytes: two lines of pairs16.
  void store_four(const Bytes64& codes, uint8_t* to) const {
    store_two(signed_lanes<0>(codes), signed_lanes<1>(codes), to);
    store_two(signed_lanes<2>(codes), signed_lanes<3>(codes), to + kLine);
  }
};

// Weights in groups, as tiles of bf16.
template <int Bits, bool Floats>
struct GroupValues {
  const Quantized& q;

  // Inputs [k, k + size) of a block, whole tiles.
  void expand(const uint8_t* block, int64_t k, int64_t size, uint8_t* to) const {
    for (int64_t at = k; at < k + size;) {
      const int64_t g = at / q.group, end = lesser(k + size, (g + 1) * q.group);
      expand_run(values_of(block, g), block + at * kBlockN * Bits / 8, end - at, to);
      to += (end - at) * kBlockN * 2;
      at = end;
    }
  }
  // Where its codes begin, and how many bytes they are.
  int64_t codes_at(int64_t k) const { return k * kBlockN * Bits / 8; }

 private:
  ValuesOf values_of(const uint8_t* block, int64_t g) const {
    ValuesOf values{zero(), load_scales(block + q.scales, g * kBlockN, q.scale_type).part[0], zero()};
    // nibble_lanes() counts from kNibbleZero.
    if (Bits == 4 && has_offsets(q)) values.shift = zero() - group_offsets(q, block, g).part[0];
    if (q.has_mins) values.offset = load_scales(block + q.mins, g * kBlockN, q.scale_type).part[0];
    return values;
  }

  static void expand_run(const ValuesOf& values, const uint8_t* codes, int64_t size, uint8_t* to) {
    for (int64_t i = 0; i < size * Bits / 32; i++) {
      const Bytes64 line = load_bytes(codes + i * kLine);
      if constexpr (Bits == 8) {
        values.store_four(line, to + 2 * i * kLine);
      } else {
        uint8_t* const pairs = to + 4 * i * kLine;
        values.store_two(lanes<0>(line), lanes<2>(line), pairs);
        values.store_two(lanes<4>(line), lanes<6>(line), pairs + kLine);
        values.store_two(lanes<1>(line), lanes<3>(line), pairs + 2 * kLine);
        values.store_two(lanes<5>(line), lanes<7>(line), pairs + 3 * kLine);
      }
    }
  }
  template <int I>
  static Lanes16 lanes(const Bytes64& line) {
    if constexpr (Floats) return twice_float_lanes<I>(line);
    return nibble_lanes<I>(line);
  }
};

// The same of weights in super-blocks.
template <int Bits>
struct SuperValues {
  using Run = CodeRun<Bits>;
  const SuperBlocks& q;

  void expand(const uint8_t* block, int64_t k, int64_t size, uint8_t* to) const {
    for (int64_t at = k; at < k + size; at += Run::kInputs) {
      const uint8_t* super = block + at / SuperBlocks::kInputs * q.super;
      const int64_t g = at % SuperBlocks::kInputs / Run::kInputs;
      const uint8_t* run = super + g * Run::kBytes;
      Bytes64 high{_mm512_setzero_si512()};
      if constexpr (Bits > 4) high = load_bytes(run + Run::kLines * kLine);
      expand_line<0>(values_of(super, g), run, high, to + (at - k) * kBlockN * 2);
    }
  }
  int64_t codes_at(int64_t k) const { return k * q.super / SuperBlocks::kInputs; }

 private:
  ValuesOf values_of(const uint8_t* super, int64_t g) const {
    const Lanes16 small = to_lanes(
        {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(super + q.sub_scales + g * kBlockN)))});
    const Vec scale = load_scales(super + q.scales, 0, q.scale_type).part[0] * small.part[0];
    const Vec shift = set1(static_cast<float>(-q.zero()));
    if (!q.has_mins) return {shift, scale, zero()};
    // Of two groups side by side.
    const __m512i pairs = _mm512_cvtepu16_epi32(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(super + q.sub_mins + g / 2 * 2 * kBlockN)));
    const Ints16 small_min{g % 2 ? _mm512_srli_epi32(pairs, 8) : _mm512_and_si512(pairs, _mm512_set1_epi32(255))};
    return {shift, scale, load_scales(super + q.mins, 0, q.scale_type).part[0] * to_lanes(small_min).part[0]};
  }

  template <int Line>
  static void expand_line(const ValuesOf& values, const uint8_t* run, const Bytes64& high, uint8_t* to) {
    const Bytes64 line = load_bytes(run + Line * kLine);
    values.store_four(whole_codes<Bits, 2 * Line>(low_nibbles(line), high), to + 4 * Line * kLine);
    values.store_four(whole_codes<Bits, 2 * Line + 1>(high_nibbles(line), high), to + (4 * Line + 2) * kLine);
    if constexpr (Line + 1 < Run::kLines) expand_line<Line + 1>(values, run, high, to);
  }
};

// Weights that become tiles in `room`, a piece at a time.
template <class Values>
struct TilesExpanded {
  static constexpr int64_t kTileInputs = kTileBytes / kBlockN / 2;
  const Values& values;
  int64_t block;
  uint8_t* room;

  Panel panel(const WeightStream& stream, int64_t tile, int64_t steps) const {
    const int64_t k = tile * kTileInputs, size = steps * kTileInputs, bytes = steps * kTileBytes;
    const bool two = stream.second != 0;
    values.expand(stream.w, k, size, room);
    if (two) values.expand(stream.w + stream.second, k, size, room + bytes);
    const char* first = reinterpret_cast<const char*>(room);
    Panel panel{first, two ? first + bytes : first, kTileBytes, static_cast<int>(steps)};
    const int64_t at = values.codes_at(k);
    stream.aim(panel, at, values.codes_at(k + size) - at);
    return panel;
  }
};

template <class Values, class Layout>
struct WidenedAmx : AmxProduct {
  const Values values;
  const Layout& layout;
  WidenedAmx(const Layout& of, const StagedX& staged) : AmxProduct(staged), values{of}, layout(of) {}

  AmxScope scope(int64_t m) const { return {static_cast<int>(lesser(m, kTileRows)), kLine}; }
  bool many(int) const { return true; }
  template <class Ends>
  void tile(int64_t, int, const uint8_t*, int, const uint8_t*, float*, const Ends&) const {}
  template <class Ends>
  void tile_many(int64_t m, int rows, const TaskBlocks& blocks, float* sums, float* up_sums, const Ends& ends) const {
    alignas(64) uint8_t room[kBlocks * kManyPieceTiles * kTileBytes];
    const TilesExpanded<Values> weights{values, layout.block, room};
    multiply_task<Bf16Tiles>(x, m, rows, blocks, layout.kp * 2 / kLine, weights, sums, up_sums, ends);
  }
};

}  // namespace radix::cpu::RK_ISA

#endif
