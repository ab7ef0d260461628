// Products on AMX tiles: bf16 x bf16 -> float32, int8 x int8 -> int32, 16 x 16 outputs and 64 bytes of k a tile.
//
// C tiles 0..3 (two of rows by two packed blocks), A tiles 4..5, B tiles 6..7 straight from pairs16 or quads16 or from
// codes expanded to them. A chunk of rows lies in L2, and so does the panel of B that all of it passes by; meanwhile
// the panel that follows comes from memory to L2, a few lines a step, so that the bus and the tiles work at the same
// time. K is walked in pieces; between them C waits in memory, which changes no bit. A tile sums over its k in one
// fixed order and tiles follow in ascending k, whatever the number of rows, so M = 1 gives the same bits as the same
// row inside a large batch.
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

// C tile 2 i + j += A tile 4 + i times B tile 6 + j.
struct Bf16Tiles {
  static void c00() { _tile_dpbf16ps(0, 4, 6); }
  static void c01() { _tile_dpbf16ps(1, 4, 7); }
  static void c10() { _tile_dpbf16ps(2, 5, 6); }
  static void c11() { _tile_dpbf16ps(3, 5, 7); }
};
struct Int8Tiles {
  static void c00() { _tile_dpbssd(0, 4, 6); }
  static void c01() { _tile_dpbssd(1, 4, 7); }
  static void c10() { _tile_dpbssd(2, 5, 6); }
  static void c11() { _tile_dpbssd(3, 5, 7); }
};

// The B tiles of a piece of k for two packed blocks (the second may be the first again).
struct Panel {
  const char *b0, *b1;
  int64_t step;  // bytes from tile to tile
  int steps;
  // What to fetch into L2 meanwhile: so many lines from each of these on.
  const char *next0 = nullptr, *next1 = nullptr;
  int64_t next_lines = 0;
};

// The share of it that falls to the steps of one pass over the panel.
struct Fetch {
  const char *next0, *next1;
  int lines;  // a step, of each
};

// How many tiles ahead of the one that is loaded next operands are fetched into L1.
constexpr int kTilesAhead = 2;

inline void fetch_tile(const char* tile) {
  for (int line = 0; line < kTileRows; line++) __builtin_prefetch(tile + line * kLine, 0, 3);
}

// a: tiles of 16 rows, kTileBytes apart; those of the next 16 rows are `row16` further. c: [32][32] words. A tile's
// registers are loaded again as soon as their last product is issued: beside a busy sibling thread there are none to
// spare that would rename them. Few: no other rows will read the panel, so it comes from memory now: its tiles are
// fetched into L1 too.
template <class Tiles, int RowTiles, bool Few>
inline void multiply(const char* a, int64_t row16, const Panel& panel, Fetch fetch, char* c, bool accumulate) {
  constexpr int kStride = 2 * kBlockN * 4;
  constexpr bool kTwo = RowTiles == 2;
  char* c1 = c + kTileRows * kStride;
  asm volatile("" ::: "memory");  // operands may just have been written; the intrinsics do not say so
  const char *b0 = panel.b0, *b1 = panel.b1;
  _tile_loadd(6, b0, kLine);
  _tile_loadd(4, a, kLine);
  if constexpr (kTwo) _tile_loadd(5, a + row16, kLine);
  _tile_loadd(7, b1, kLine);
  if (accumulate) {
    _tile_loadd(0, c, kStride);
    if constexpr (kTwo) _tile_loadd(2, c1, kStride);
    _tile_loadd(1, c + 64, kStride);
    if constexpr (kTwo) _tile_loadd(3, c1 + 64, kStride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int left = panel.steps; left > 0; left--) {
    a += kTileBytes;
    b0 += panel.step;
    b1 += panel.step;
    for (int line = 0; line < fetch.lines; line++) {
      __builtin_prefetch(fetch.next0 + line * kLine, 0, 2);
      __builtin_prefetch(fetch.next1 + line * kLine, 0, 2);
    }
    fetch.next0 += fetch.lines * kLine;
    fetch.next1 += fetch.lines * kLine;
    if constexpr (kTwo || !Few) fetch_tile(a + kTilesAhead * kTileBytes);
    if constexpr (kTwo) fetch_tile(a + row16 + kTilesAhead * kTileBytes);
    if constexpr (Few) {
      fetch_tile(b0 + kTilesAhead * panel.step);
      fetch_tile(b1 + kTilesAhead * panel.step);
    }
    const bool more = left > 1;
    Tiles::c00();
    if constexpr (kTwo) Tiles::c10();
    if (more) _tile_loadd(6, b0, kLine);
    Tiles::c01();
    if (more) _tile_loadd(4, a, kLine);
    if constexpr (kTwo) Tiles::c11();
    if (more && kTwo) _tile_loadd(5, a + row16, kLine);
    if (more) _tile_loadd(7, b1, kLine);
  }
  _tile_stored(0, c, kStride);
  _tile_stored(1, c + 64, kStride);
  if constexpr (RowTiles == 2) {
    _tile_stored(2, c1, kStride);
    _tile_stored(3, c1 + 64, kStride);
  }
  asm volatile("" ::: "memory");
}

constexpr int kPassRows = 2 * kTileRows;
constexpr int64_t kPassBytes = kPassRows * 2 * kBlockN * 4;  // of sums

// Words of c (+)= rows m .. of x by the panel, a pass of 32 rows at a time, [32][32] each, `c_step` bytes apart; calls
// before(its first row, its rows) and after(...) around each. The A tiles begin `offset` bytes into tile `chunk` of a
// row.
template <class Tiles, class Before, class After>
inline void multiply_rows(const StagedX& x, int64_t m, int rows, int64_t chunk, int64_t offset, const Panel& panel,
                          void* c, int64_t c_step, bool accumulate, const Before& before, const After& after) {
  const int64_t steps = (rows + kPassRows - 1) / kPassRows * panel.steps,
                lines = (panel.next_lines + steps - 1) / steps;
  for (int r = 0; r < rows; r += kPassRows) {
    const char* a = x.at(m + r, chunk) + offset;
    char* to = static_cast<char*>(c) + r / kPassRows * c_step;
    const int64_t done = r / kPassRows * panel.steps * lines;
    const Fetch fetch{panel.next0 + done * kLine, panel.next1 + done * kLine,
                      done < panel.next_lines ? static_cast<int>(lines) : 0};
    const int ready = static_cast<int>(lesser(kPassRows, rows - r));
    before(r, ready);
    if (rows - r > kTileRows) {
      rows <= kPassRows ? multiply<Tiles, 2, true>(a, x.row16, panel, fetch, to, accumulate)
                        : multiply<Tiles, 2, false>(a, x.row16, panel, fetch, to, accumulate);
    } else {
      rows <= kPassRows ? multiply<Tiles, 1, true>(a, x.row16, panel, fetch, to, accumulate)
                        : multiply<Tiles, 1, false>(a, x.row16, panel, fetch, to, accumulate);
    }
    after(r, ready);
  }
}

constexpr int kAmxRows = 512;
constexpr int64_t kChunkBytes = 3 << 19;  // of x, to stay in L2
constexpr int64_t kPieceTiles = 32;       // of k

// The weights of a task as they are read: two neighbouring blocks and then, unless NULL, those from `next` on.
struct WeightStream {
  const uint8_t *w, *next;
  int64_t block;   // bytes
  int64_t second;  // bytes to the second block; 0: a lone last block is computed twice

  // Has the panel fetch what lies as far ahead as the panel is long, and at least 4 KiB: as many bytes as it is made
  // of.
  void aim(Panel& panel, int64_t at, int64_t bytes) const {
    const int64_t ahead = at + greater(bytes, 4096);
    if (ahead >= block && !next) return;
    panel.next0 = reinterpret_cast<const char*>(ahead < block ? w + ahead : next + (ahead - block));
    panel.next1 = panel.next0 + second;
    panel.next_lines = bytes / kLine;
  }
};

// How x lies for tiles: [m / 16][bytes of k / 64][16 rows][64]. Rows past m are not written: what they hold meets no
// other row.
inline StagedX tiled_x(char* values, int64_t row_bytes) {
  return {values, 16 * row_bytes, kLine, kTileBytes, nullptr, nullptr};
}

struct AmxProduct {
  static constexpr int kRows = kAmxRows, kBlocks = 2;
  static constexpr bool kOnTiles = true;
  const StagedX& x;
  explicit AmxProduct(const StagedX& staged) : x(staged) {}

  // Equal chunks of whole passes: the more rows meet a panel, the fewer times the weights are read.
  int64_t chunk_rows(int64_t m) const {
    const int64_t most = greater(64, lesser(kAmxRows, kChunkBytes / (x.row16 / 16) / 32 * 32));
    const int64_t chunks = (m + most - 1) / most;
    return round_up((m + chunks - 1) / chunks, 32);
  }
};

// bf16 weights.
struct DenseAmx : AmxProduct {
  int64_t tiles;  // of k
  DenseAmx(const StagedX& staged, int64_t k_tiles) : AmxProduct(staged), tiles(k_tiles) {}

  AmxScope scope(int64_t m) const { return {static_cast<int>(lesser(m, kTileRows)), 64}; }
  template <class Ends>
  void tile(int64_t m, int rows, const uint8_t* w, int count, const uint8_t* next, float* sums,
            const Ends& ends) const {
    const WeightStream stream{w, next, tiles * kTileBytes, count == 2 ? tiles * kTileBytes : 0};
    for (int64_t t = 0; t < tiles; t += kPieceTiles) {
      const char* b0 = reinterpret_cast<const char*>(w) + t * kTileBytes;
      const int steps = static_cast<int>(lesser(kPieceTiles, tiles - t));
      Panel panel{b0, b0 + stream.second, kTileBytes, steps};
      stream.aim(panel, t * kTileBytes, steps * kTileBytes);
      const auto before = [&](int r, int ready) {
        if (t == 0) ends.begin(r, ready);
      };
      const auto after = [&](int r, int ready) {
        if (t + steps == tiles) ends.finish(r, ready);
      };
      multiply_rows<Bf16Tiles>(x, m, rows, t, 0, panel, sums, kPassBytes, t > 0, before, after);
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
          expand_bf16<Bits>(codes + b * stream.second, size, room + b * bytes);
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
          if (k == 0) ends.begin(r, ready);
        };
        const auto after = [&](int r, int ready) {
          if (k + size < end) return;
          fold(m + r, ready, w, count, g, words + r / kPassRows * step / 4, sums + r * kBlocks * kBlockN);
          if (g + 1 == q.groups) ends.finish(r, ready);
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
        if constexpr (Int8X) {
          const Ints16 codes{_mm512_load_si512(words + word)};
          // Exact, as the sums of codes are: the same bits as on vectors.
          values = q.has_zeros ? corrected(codes, small_zeros(q, block, g), static_cast<const int32_t*>(x.sums)[at])
                               : to_lanes(codes);
          row_scale = times(scale, x.scales[at]);
        } else {
          values.load_line(reinterpret_cast<const float*>(words + word));
          if (q.has_zeros) take_zeros(values, group_offsets(q, block, g), static_cast<const float*>(x.sums)[at]);
        }
        add_scaled(sums + word, values, row_scale, g == 0);
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
