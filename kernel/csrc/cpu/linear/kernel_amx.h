// Products on AMX tiles.
//
// A chunk of rows lies in L2, and so do the blocks of weights that all of it passes by; meanwhile those that follow
// come from memory to L2, a few lines a step, so that the bus and the tiles work at the same time. B tiles come
// straight from pairs16 or quads16 or from codes expanded to them. M = 1 gives the same bits as the same row inside a
// large batch.
#pragma once

#include "cpu/tiles.h"

#if RK_HAS_PRODUCT_TILES

#include <type_traits>

#include "common/dtype.h"
#include "cpu/linear/amx_passes.h"

namespace radix::cpu::RK_ISA {

constexpr int kAmxRows = 512;
static_assert(kAmxRows % kPassRows == 0 && kPassRows == 2 * kTileRows, "whole passes of two tiles of rows");
constexpr int64_t kChunkBytes = 3 << 19;  // of x, to stay in L2

// How x lies for tiles: [m / 16][bytes of k / 64][16 rows][64]. Rows past m are not written: what they hold meets no
// other row.
inline StagedX tiled_x(char* values, int64_t row_bytes) {
  return {values, 16 * row_bytes, kLine, kTileBytes, nullptr, nullptr};
}

struct AmxProduct {
  static constexpr int kRows = kAmxRows, kBlocks = 2;
  static constexpr bool kOnTiles = true, kTakesBf16 = true;
  const StagedX& x;
  explicit AmxProduct(const StagedX& staged) : x(staged) {}

  // Equal chunks of whole passes: the more rows meet a panel, the fewer times the weights are read.
  int64_t chunk_rows(int64_t m) const {
    const int64_t most = greater(64, lesser(kAmxRows, kChunkBytes / (x.row16 / 16) / 32 * 32));
    const int64_t chunks = (m + most - 1) / most;
    return round_up((m + chunks - 1) / chunks, 32);
  }
};

// How bf16 weights lie.
struct DenseBlocks {
  int64_t kp, block;  // bytes of a block
  explicit DenseBlocks(const rk_packed_desc& d) : kp(linear_layout::padded_k(d.k)), block(kp * kBlockN * 2) {}
};

struct DenseAmx : AmxProduct {
  int64_t tiles;  // of k
  DenseAmx(const DenseBlocks& layout, const StagedX& staged) : AmxProduct(staged), tiles(layout.kp * 2 / kLine) {}

  AmxScope scope(int64_t m) const { return {static_cast<int>(lesser(m, kTileRows)), 64}; }
  bool many(int rows) const { return rows > kPassRows; }
  template <class Ends>
  void tile_many(int64_t m, int rows, const TaskBlocks& blocks, float* sums, float* up_sums, const Ends& ends) const {
    multiply_task<Bf16Tiles>(x, m, rows, blocks, tiles, TilesInPlace{tiles * kTileBytes}, sums, up_sums, ends);
  }
  template <class Ends>
  void tile(int64_t m, int rows, const uint8_t* w, int count, const uint8_t* next, float* sums,
            const Ends& ends) const {
    const WeightStream stream{w, next, tiles * kTileBytes, count == 2 ? tiles * kTileBytes : 0};
    for (int64_t t = 0; t < tiles; t += kPieceTiles) {
      const int64_t steps = lesser(kPieceTiles, tiles - t);
      const Panel panel = stream.panel(t * kTileBytes, kTileBytes, steps);
      const auto before = [&](int r, int ready) {
        if (t > 0) return;
        ends.fetch(r, ready);
        ends.begin(r, ready);
      };
      const auto after = [&](int r, int ready) {
        if (t + steps == tiles) ends.finish(r, ready, sums + r * kBlocks * kBlockN);
      };
      multiply_rows<Bf16Tiles>(x, m, rows, t, 0, panel, sums, kPassBytes, t > 0, before, after);
    }
  }
};

// 4-bit codes less 8 as bytes: a line of nibbles16 becomes two of quads16.
inline Bytes64 signed_codes(Bytes64 codes) {
  return {_mm512_sub_epi8(codes.v, _mm512_set1_epi8(kNibbleZero))};
}
inline void expand_nibbles(const uint8_t* codes, int64_t k, uint8_t* to) {
  for (int64_t i = 0; i < k / 8; i++) {
    const Bytes64 line = load_bytes(codes + i * kLine);
    _mm512_store_si512(to + 2 * i * kLine, signed_codes(low_nibbles(line)).v);
    _mm512_store_si512(to + (2 * i + 1) * kLine, signed_codes(high_nibbles(line)).v);
  }
}
// 16 pairs of codes as bf16, exactly: a line of pairs16.
inline void store_pairs(const Lanes16& even, const Lanes16& odd, uint8_t* to) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.part[0].v), 16);
  const __m512i high = _mm512_castps_si512(odd.part[0].v);  // its low half is zero
  _mm512_store_si512(to, _mm512_or_si512(low, high));
}
template <int Bits, bool Floats>
inline void expand_bf16(const uint8_t* codes, int64_t k, uint8_t* to) {
  static_assert(Bits == 4 || Bits == 8);
  for (int64_t i = 0; i < k * Bits / 32; i++) {
    const Bytes64 line = load_bytes(codes + i * kLine);
    if constexpr (Bits == 8 && Floats) {
      _mm512_store_si512(to, float8_pairs(codes + i * kLine));
      _mm512_store_si512(to + kLine, float8_pairs(codes + i * kLine + kLine / 2));
      to += 2 * kLine;
    } else if constexpr (Bits == 8) {
      store_pairs(signed_lanes<0>(line), signed_lanes<1>(line), to);
      store_pairs(signed_lanes<2>(line), signed_lanes<3>(line), to + kLine);
      to += 2 * kLine;
    } else {
      store_pairs(nibble_lanes<0>(line), nibble_lanes<2>(line), to);
      store_pairs(nibble_lanes<4>(line), nibble_lanes<6>(line), to + kLine);
      store_pairs(nibble_lanes<1>(line), nibble_lanes<3>(line), to + 2 * kLine);
      store_pairs(nibble_lanes<5>(line), nibble_lanes<7>(line), to + 3 * kLine);
      to += 4 * kLine;
    }
  }
}

// Quantized weights, with x in int8 (in groups of whole tiles) or, as it is, in bf16. Sums of a group of K as in
// kernel_codes.h.
template <int Bits, bool Int8X, bool Floats = false>
struct CodesOnTiles : AmxProduct {
  static_assert(Bits == 4 || Bits == 8);
  const Quantized& q;
  static constexpr int64_t kElement = Int8X ? 1 : 2;  // bytes of a value of x
  static constexpr bool kExpanded = !(Int8X && Bits == 8);
  static constexpr int64_t kPieceK = kPieceTiles * kLine / kElement;
  CodesOnTiles(const Quantized& layout, const StagedX& staged) : AmxProduct(staged), q(layout) {}

  // Of w8a8 with a scale a row: the codes' sums are folded where they become outputs.
  bool many(int rows) const { return Int8X && Bits == 8 && q.groups == 1 && rows > kPassRows; }
  template <class Ends>
  void tile_many(int64_t m, int rows, const TaskBlocks& blocks, float* sums, float* up_sums, const Ends& ends) const {
    if constexpr (Int8X && Bits == 8) {
      const FoldedEnds<Ends> folded{*this, ends, m, blocks};
      multiply_task<Int8Tiles>(x, m, rows, blocks, q.kp / kLine, TilesInPlace{q.block}, sums, up_sums, folded);
    }
  }
  template <class Ends>
  struct FoldedEnds {
    const CodesOnTiles& product;
    const Ends& ends;
    int64_t m;
    const TaskBlocks& blocks;
    static constexpr int kSteps = 4;  // the blocks' scales are loaded once for all rows of a call
    void fetch(int64_t row, int64_t rows) const { ends.fetch(row, rows); }
    void begin(int64_t row, int64_t rows) const { ends.begin(row, rows); }
    void finish(int64_t row, int64_t rows, float* sums, float* up_sums) const {
      fold(blocks.w, row, rows, sums);
      if (blocks.up) fold(blocks.up, row, rows, up_sums);
      ends.finish(row, rows, sums, up_sums);
    }
    void fold(const uint8_t* w, int64_t row, int64_t rows, float* sums) const {
      product.fold(m + row, static_cast<int>(rows), w, blocks.count, 0, reinterpret_cast<const int32_t*>(sums), sums);
    }
  };

  int step() const { return static_cast<int>(lesser(q.group * kElement, kLine)); }
  AmxScope scope(int64_t m) const { return {static_cast<int>(lesser(m, kTileRows)), step()}; }

  // The panel of k .. k + size: in place, or expanded to `room` [2][size * 16 * kElement].
  Panel panel(const WeightStream& stream, int64_t k, int64_t size, uint8_t* room) const {
    const int64_t bytes = size * kBlockN * kElement, step_bytes = step() * kBlockN, at = k * kBlockN * Bits / 8;
    const uint8_t* codes = stream.w + at;
    const char* first = reinterpret_cast<const char*>(codes);
    Panel panel{first, first + stream.second, step_bytes, static_cast<int>(bytes / step_bytes)};
    if constexpr (kExpanded) {
      for (int b = 0; b < (stream.second ? 2 : 1); b++) {
        if constexpr (Int8X) {
          expand_nibbles(codes + b * stream.second, size, room + b * bytes);
        } else {
          expand_bf16<Bits, Floats>(codes + b * stream.second, size, room + b * bytes);
        }
      }
      panel.b0 = reinterpret_cast<const char*>(room);
      panel.b1 = panel.b0 + (stream.second ? bytes : 0);
    }
    stream.aim(panel, at, size * kBlockN * Bits / 8);
    return panel;
  }

  template <class Ends>
  void tile(int64_t m, int rows, const uint8_t* w, int count, const uint8_t* next, float* sums,
            const Ends& ends) const {
    using Tiles = std::conditional_t<Int8X, Int8Tiles, Bf16Tiles>;
    alignas(64) uint8_t room[kExpanded ? 2 * kPieceK * kBlockN * kElement : 1];
    alignas(64) int32_t words[kAmxRows * kBlocks * kBlockN];  // int32 or float32
    const WeightStream stream{w, next, q.block, count == 2 ? q.block : 0};
    const int64_t step = q.group > kPieceK ? kPassBytes : 0;  // of words, where a group's wait for its next piece
    for (int64_t g = 0; g < q.groups; g++) {
      const int64_t begin = g * q.group, end = begin + q.group;
      for (int64_t k = begin; k < end; k += kPieceK) {
        const int64_t size = lesser(kPieceK, end - k), at = k * kElement;
        const Panel piece = panel(stream, k, size, room);
        const auto before = [&](int r, int ready) {
          if (k > 0) return;
          ends.fetch(r, ready);
          ends.begin(r, ready);
        };
        const auto after = [&](int r, int ready) {
          if (k + size < end) return;
          fold(m + r, ready, w, count, g, words + r / kPassRows * step / 4, sums + r * kBlocks * kBlockN);
          if (g + 1 == q.groups) ends.finish(r, ready, sums + r * kBlocks * kBlockN);
        };
        multiply_rows<Tiles>(x, m, rows, at / kLine, at % kLine, piece, words, step, k > begin, before, after);
      }
    }
  }

  // sums [rows][2][16] (+)= the words of group g, which are codes' sums.
  void fold(int64_t m, int rows, const uint8_t* w, int count, int64_t g, const int32_t* words, float* sums) const {
    [[maybe_unused]] const std::conditional_t<Int8X, int, FlushScope> flush{};
    for (int b = 0; b < count; b++) {
      const uint8_t* block = w + b * q.block;
      const Lanes16 scale = load_scales(block + q.scales, g * kBlockN, q.scale_type);
      for (int r = 0; r < rows; r++) {
        const int64_t at = (m + r) * q.groups + g, word = (r * kBlocks + b) * kBlockN;
        Lanes16 values;
        Lanes16 row_scale = scale;
        float x_sum = 0;
        if constexpr (Int8X) {
          const Ints16 codes{_mm512_load_si512(words + word)};
          // Exact, as the sums of codes are: the same bits as on vectors.
          const int32_t x_codes = static_cast<const int32_t*>(x.sums)[at];
          values = has_offsets(q) ? corrected(codes, small_zeros(q, block, g), x_codes) : to_lanes(codes);
          row_scale = times(scale, x.scales[at]);
          x_sum = static_cast<float>(x_codes) * x.scales[at];
        } else {
          values.load_line(reinterpret_cast<const float*>(words + word));
          if constexpr (Bits == 8 && Floats) restore_float8(values);
          x_sum = static_cast<const float*>(x.sums)[at];
          if (has_offsets(q)) take_zeros(values, group_offsets(q, block, g), x_sum);
        }
        add_scaled(sums + word, values, row_scale, g == 0);
        if (q.has_mins) add_stored_minima(sums + word, q, block, g, x_sum);
      }
    }
  }

  // Zero points less what expand_nibbles() took off.
  static Ints16 small_zeros(const Quantized& q, const uint8_t* block, int64_t g) {
    const Ints16 zeros = q.has_zeros ? load_zeros(block + q.zeros + g * kBlockN) : no_ints();
    return {_mm512_sub_epi32(zeros.v, _mm512_set1_epi32(kNibbleZero))};
  }
};

template <int Bits, bool Int8X>
using CodesAmx = CodesOnTiles<Bits, Int8X>;
using Float8Amx = CodesOnTiles<8, false, true>;

}  // namespace radix::cpu::RK_ISA

#endif
