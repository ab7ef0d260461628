// Products on AMX tiles: bf16 x bf16 -> float32, int8 x int8 -> int32, 16 x 16 outputs and 64 bytes of k a tile.
//
// C tiles 0..3 (two of rows by two packed blocks), A tiles 4..5, B tiles 6..7 straight from pairs16 or quads16 or from
// codes expanded to them. K is walked in pieces whose B panel stays in L1 while the A tiles of all rows stream past it;
// between pieces C waits in memory, which changes no bit. A tile sums over its k in one fixed order and tiles follow in
// ascending k, whatever the number of rows, so M = 1 gives the same bits as the same row inside a large batch.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <type_traits>

#include "common/dtype.h"
#include "cpu/linear/kernel_codes.h"

namespace radix::cpu::RK_ISA {

constexpr int kTileRows = 16;
constexpr int64_t kTileBytes = 1024;

// Tile shapes are per thread and other libraries change them: load at every kernel entry, release at its end so that
// the kernel does not save 8 KiB of state at each context switch.
// rows: of the first A tile and its C tiles, 1 .. 16; step: bytes of k in a tile, 64 or 32.
class AmxScope {
 public:
  AmxScope(int rows, int step) {
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    for (int i = 0; i < 8; ++i) {
      const bool a = i == 4 || i == 5, b = i == 6 || i == 7, first = i == 0 || i == 1 || i == 4;
      config.bytes_per_row[i] = static_cast<uint16_t>(a ? step : 64);
      config.rows[i] = static_cast<uint8_t>(b ? step / 4 : first ? rows : kTileRows);
    }
    // gcc 12's intrinsic declares 8 of the 64 bytes as input and drops the other stores.
    asm volatile("ldtilecfg %0" ::"m"(*reinterpret_cast<const char(*)[64]>(&config)) : "memory");
  }
  ~AmxScope() { _tile_release(); }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
};

struct Bf16Tiles {
  static void first_row() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  static void second_row() {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};
struct Int8Tiles {
  static void first_row() {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
  }
  static void second_row() {
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
};
// The B tiles of a piece of k for two packed blocks (the second may be the first again).
struct Panel {
  const char *b0, *b1;
  int64_t step;  // bytes from tile to tile
  int steps;
  // What to fetch meanwhile: `lines` lines of both blocks a step, from here on.
  const char *next0, *next1;
  int lines;
};

// a: tiles of 16 rows, kTileBytes apart; those of the next 16 rows are `row16` further. c: [32][32] words.
template <class Tiles, int RowTiles, bool Fetch>
inline void multiply(const char* a, int64_t row16, const Panel& panel, char* c, bool accumulate) {
  constexpr int kStride = 2 * kBlockN * 4;
  char* c1 = c + kTileRows * kStride;
  asm volatile("" ::: "memory");  // operands may just have been written; the intrinsics do not say so
  if (accumulate) {
    _tile_loadd(0, c, kStride);
    _tile_loadd(1, c + 64, kStride);
    if constexpr (RowTiles == 2) {
      _tile_loadd(2, c1, kStride);
      _tile_loadd(3, c1 + 64, kStride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (RowTiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  const char *b0 = panel.b0, *b1 = panel.b1;
  for (int i = 0; i < panel.steps; i++) {
    _tile_loadd(4, a, kLine);
    _tile_loadd(6, b0, kLine);
    _tile_loadd(7, b1, kLine);
    if constexpr (Fetch) {
      const int64_t first = i * panel.lines * kLine;
      for (int line = 0; line < panel.lines; line++) {
        __builtin_prefetch(panel.next0 + first + line * kLine, 0, 3);
        __builtin_prefetch(panel.next1 + first + line * kLine, 0, 3);
      }
    }
    Tiles::first_row();
    if constexpr (RowTiles == 2) {
      _tile_loadd(5, a + row16, kLine);
      Tiles::second_row();
    }
    a += kTileBytes;
    b0 += panel.step;
    b1 += panel.step;
  }
  _tile_stored(0, c, kStride);
  _tile_stored(1, c + 64, kStride);
  if constexpr (RowTiles == 2) {
    _tile_stored(2, c1, kStride);
    _tile_stored(3, c1 + 64, kStride);
  }
  asm volatile("" ::: "memory");
}

// c [rows][32] (+)= rows m .. of x by the panel. The A tiles begin `offset` bytes into tile `chunk` of a row.
template <class Tiles>
inline void multiply_rows(const StagedX& x, int64_t m, int rows, int64_t chunk, int64_t offset, const Panel& panel,
                          void* c, bool accumulate) {
  for (int r = 0; r < rows; r += 2 * kTileRows) {
    const char* a = x.at(m + r, chunk) + offset;
    char* to = static_cast<char*>(c) + r * 2 * kBlockN * 4;
    // The first rows find the weights in memory, the others in cache.
    if (rows - r <= kTileRows) {
      r == 0 ? multiply<Tiles, 1, true>(a, x.row16, panel, to, accumulate)
             : multiply<Tiles, 1, false>(a, x.row16, panel, to, accumulate);
    } else {
      r == 0 ? multiply<Tiles, 2, true>(a, x.row16, panel, to, accumulate)
             : multiply<Tiles, 2, false>(a, x.row16, panel, to, accumulate);
    }
  }
}

constexpr int kAmxRows = 256;
constexpr int64_t kPieceTiles = 16;  // of k: a B panel of 32 KiB
constexpr int64_t kFetchAhead = 4096;

// How x lies for tiles: [m / 16][bytes of k / 64][16 rows][64]. Rows past m are not written: what they hold meets no
// other row.
inline StagedX tiled_x(char* values, int64_t row_bytes) {
  return {values, 16 * row_bytes, kLine, kTileBytes, nullptr, nullptr};
}

struct AmxProduct {
  static constexpr int kRows = kAmxRows, kBlocks = 2;
  const StagedX& x;
  explicit AmxProduct(const StagedX& staged) : x(staged) {}
  int64_t chunk_rows() const { return kAmxRows; }
};

// bf16 weights.
struct DenseAmx : AmxProduct {
  int64_t tiles;  // of k
  DenseAmx(const StagedX& staged, int64_t k_tiles) : AmxProduct(staged), tiles(k_tiles) {}

  AmxScope scope(int64_t m) const { return {static_cast<int>(lesser(m, kTileRows)), 64}; }
  void tile(int64_t m, int rows, const uint8_t* w, int count, float* sums) const {
    for (int64_t t = 0; t < tiles; t += kPieceTiles) {
      const char* b0 = reinterpret_cast<const char*>(w) + t * kTileBytes;
      const char* b1 = b0 + (count == 2 ? tiles * kTileBytes : 0);  // a lone last block is computed twice
      const int steps = static_cast<int>(lesser(kPieceTiles, tiles - t));
      const Panel panel{b0, b1, kTileBytes, steps, b0 + kFetchAhead, b1 + kFetchAhead, 16};
      multiply_rows<Bf16Tiles>(x, m, rows, t, 0, panel, sums, t > 0);
    }
  }
};

// 4-bit codes less 8 as bytes: a line of nibbles16 becomes two of quads16.
inline void expand_nibbles(const uint8_t* codes, int64_t k, uint8_t* to) {
  const __m512i zero = _mm512_set1_epi8(kNibbleZero);
  for (int64_t i = 0; i < k / 8; i++) {
    const Bytes64 line = load_bytes(codes + i * kLine);
    _mm512_store_si512(to + 2 * i * kLine, _mm512_sub_epi8(low_nibbles(line).v, zero));
    _mm512_store_si512(to + (2 * i + 1) * kLine, _mm512_sub_epi8(high_nibbles(line).v, zero));
  }
}
// 16 pairs of codes as bf16, exactly: a line of pairs16.
inline void store_pairs(const Lanes16& even, const Lanes16& odd, uint8_t* to) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.part[0].v), 16);
  const __m512i high = _mm512_castps_si512(odd.part[0].v);  // its low half is zero
  _mm512_store_si512(to, _mm512_or_si512(low, high));
}
template <int Bits>
inline void expand_bf16(const uint8_t* codes, int64_t k, uint8_t* to) {
  for (int64_t i = 0; i < k * Bits / 32; i++) {
    const Bytes64 line = load_bytes(codes + i * kLine);
    if constexpr (Bits == 8) {
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

// Quantized weights, with x in int8 or, as it is, in bf16. Sums of a group of K as in kernel_codes.h.
template <int Bits, bool Int8X>
struct CodesAmx : AmxProduct {
  const Quantized& q;
  static constexpr int64_t kElement = Int8X ? 1 : 2;  // bytes of a value of x
  static constexpr bool kExpanded = !(Int8X && Bits == 8);
  static constexpr int64_t kPieceK = kPieceTiles * kLine / kElement;
  CodesAmx(const Quantized& layout, const StagedX& staged) : AmxProduct(staged), q(layout) {}

  int step() const { return Int8X && q.group == 32 ? 32 : 64; }
  AmxScope scope(int64_t m) const { return {static_cast<int>(lesser(m, kTileRows)), step()}; }

  // The panel of k .. k + size: in place, or expanded to `room` [2][size * 16 * kElement].
  Panel panel(const uint8_t* w, int count, int64_t k, int64_t size, uint8_t* room) const {
    const int64_t bytes = size * kBlockN * kElement, step_bytes = step() * kBlockN;
    const int steps = static_cast<int>(bytes / step_bytes);
    const uint8_t* codes = w + k * kBlockN * Bits / 8;
    const char* first = reinterpret_cast<const char*>(codes);
    const char* second = first + (count == 2 ? q.block : 0);  // a lone last block is computed twice
    const int lines = static_cast<int>(step_bytes / kLine * Bits / (8 * kElement));
    Panel panel{first, second, step_bytes, steps, first + kFetchAhead, second + kFetchAhead, lines};
    if constexpr (kExpanded) {
      for (int b = 0; b < count; b++) {
        if constexpr (Int8X) {
          expand_nibbles(codes + b * q.block, size, room + b * bytes);
        } else {
          expand_bf16<Bits>(codes + b * q.block, size, room + b * bytes);
        }
      }
      panel.b0 = reinterpret_cast<const char*>(room);
      panel.b1 = panel.b0 + (count == 2 ? bytes : 0);
    }
    return panel;
  }

  void tile(int64_t m, int rows, const uint8_t* w, int count, float* sums) const {
    using Tiles = std::conditional_t<Int8X, Int8Tiles, Bf16Tiles>;
    alignas(64) uint8_t room[kExpanded ? 2 * kPieceK * kBlockN * kElement : 1];
    alignas(64) int32_t words[kAmxRows * kBlocks * kBlockN];  // int32 or float32
    std::memset(sums, 0, sizeof(float) * rows * kBlocks * kBlockN);
    for (int64_t g = 0; g < q.groups; g++) {
      const int64_t begin = g * q.group;
      for (int64_t k = begin; k < begin + q.group; k += kPieceK) {
        const Panel piece = panel(w, count, k, lesser(kPieceK, begin + q.group - k), room);
        const int64_t at = k * kElement;
        multiply_rows<Tiles>(x, m, rows, at / kLine, at % kLine, piece, words, k > begin);
      }
      fold(m, rows, w, count, g, words, sums);
    }
  }

  void fold(int64_t m, int rows, const uint8_t* w, int count, int64_t g, const int32_t* words, float* sums) const {
    for (int b = 0; b < count; b++) {
      const uint8_t* block = w + b * q.block;
      const Lanes16 scale = load_scales(block + q.scales, g * kBlockN, q.scale_type);
      const Lanes16 offset = group_offsets<Bits>(q, block, g);
      for (int r = 0; r < rows; r++) {
        const int64_t at = (m + r) * q.groups + g, word = (r * kBlocks + b) * kBlockN;
        Lanes16 values;
        Lanes16 row_scale = scale;
        if constexpr (Int8X) {
          const Ints16 codes{_mm512_load_si512(words + word)};
          // Exact, as the sums of codes are: the same bits as on vectors.
          values = q.has_zeros ? corrected(codes, small_zeros(q, block, g), static_cast<const int32_t*>(x.sums)[at])
                               : to_lanes(codes);
          row_scale = times(scale, x.scales[at]);
        } else {
          values.load_line(reinterpret_cast<const float*>(words + word));
          if (q.has_zeros) {
            const Vec sum = set1(static_cast<const float*>(x.sums)[at]);
            values.part[0] = fnma(offset.part[0], sum, values.part[0]);
          }
        }
        add_scaled(sums + word, values, row_scale);
      }
    }
  }

  // Zero points less what expand_nibbles() took off.
  static Ints16 small_zeros(const Quantized& q, const uint8_t* block, int64_t g) {
    const Ints16 zeros = load_zeros(block + q.zeros + g * kBlockN);
    return {_mm512_sub_epi32(zeros.v, _mm512_set1_epi32(kNibbleZero))};
  }
};

}  // namespace radix::cpu::RK_ISA

#endif
