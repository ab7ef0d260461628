// Passes over AMX tiles: bf16 x bf16 -> float32, int8 x int8 -> int32, 16 x 16 outputs and 64 bytes of k a tile.
//
// C tiles 0..3 (two of rows by two packed blocks), A tiles 4..5, B tiles 6..7. A tile sums over its k in one fixed
// order and tiles follow in ascending k, whatever the number of rows; between pieces of k C waits in memory, which
// changes no bit.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

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

  Fetch(const Panel& panel, int64_t pass, int64_t passes) {
    const int64_t steps = passes * panel.steps, share = (panel.next_lines + steps - 1) / steps;
    const int64_t done = pass * panel.steps * share;
    next0 = panel.next0 + done * kLine;
    next1 = panel.next1 + done * kLine;
    lines = done < panel.next_lines ? static_cast<int>(share) : 0;
  }
  void step() {
    for (int line = 0; line < lines; line++) {
      __builtin_prefetch(next0 + line * kLine, 0, 2);
      __builtin_prefetch(next1 + line * kLine, 0, 2);
    }
    next0 += lines * kLine;
    next1 += lines * kLine;
  }
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
    fetch.step();
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
  if constexpr (kTwo) {
    _tile_stored(2, c1, kStride);
    _tile_stored(3, c1 + 64, kStride);
  }
  asm volatile("" ::: "memory");
}

// The same for 32 rows of many. Every pass reads the panel again, a piece of k that stays in L1; x comes from L2 around
// L1, which it would only fill. Calls meanwhile() in every step.
template <class Tiles, class Meanwhile>
inline void multiply_many(const char* a, int64_t row16, const Panel& panel, Fetch fetch, char* c, bool accumulate,
                          Meanwhile& meanwhile) {
  constexpr int kStride = 2 * kBlockN * 4;
  char* c1 = c + kTileRows * kStride;
  asm volatile("" ::: "memory");
  const char *b0 = panel.b0, *b1 = panel.b1;
  _tile_loadd(6, b0, kLine);
  _tile_stream_loadd(4, a, kLine);
  _tile_stream_loadd(5, a + row16, kLine);
  _tile_loadd(7, b1, kLine);
  if (accumulate) {
    _tile_loadd(0, c, kStride);
    _tile_loadd(2, c1, kStride);
    _tile_loadd(1, c + 64, kStride);
    _tile_loadd(3, c1 + 64, kStride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int left = panel.steps; left > 0; left--) {
    a += kTileBytes;
    b0 += panel.step;
    b1 += panel.step;
    fetch.step();
    meanwhile();
    const bool more = left > 1;
    Tiles::c00();
    Tiles::c10();
    if (more) _tile_loadd(6, b0, kLine);
    Tiles::c01();
    if (more) _tile_stream_loadd(4, a, kLine);
    Tiles::c11();
    if (more) _tile_stream_loadd(5, a + row16, kLine);
    if (more) _tile_loadd(7, b1, kLine);
  }
  _tile_stored(0, c, kStride);
  _tile_stored(1, c + 64, kStride);
  _tile_stored(2, c1, kStride);
  _tile_stored(3, c1 + 64, kStride);
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
  const int passes = (rows + kPassRows - 1) / kPassRows;
  for (int r = 0; r < rows; r += kPassRows) {
    const char* a = x.at(m + r, chunk) + offset;
    char* to = static_cast<char*>(c) + r / kPassRows * c_step;
    const Fetch fetch(panel, r / kPassRows, passes);
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

// Tiles of k in a piece. Of a panel that many rows pass by it fills two thirds of L1.
constexpr int64_t kPieceTiles = 32, kManyPieceTiles = 16;

// The weights of a task as they are read: two neighbouring blocks and then, unless NULL, those from `next` on.
struct WeightStream {
  const uint8_t *w, *next;
  int64_t block;   // bytes
  int64_t second;  // bytes to the second block; 0: a lone last block is computed twice

  // The panel of `steps` tiles that begin `at` bytes into a block.
  Panel panel(int64_t at, int64_t step, int64_t steps) const {
    const char* b0 = reinterpret_cast<const char*>(w) + at;
    Panel panel{b0, b0 + second, step, static_cast<int>(steps)};
    aim(panel, at, steps * step);
    return panel;
  }

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

// The blocks of a task: those of the gates or of all outputs, those of the up rows or NULL, and what the thread reads
// next, or NULL.
struct TaskBlocks {
  const uint8_t *w, *up, *next;
  int count;
};

// The rows of a pass whose sums wait to become outputs: a few at every step of the pass that follows, so that the tiles
// do not wait for the vector units.
template <class Finish>
struct Pending {
  const Finish& finish;
  int row = 0, end = 0, share = 0;

  void add(int first, int rows, int64_t steps) {
    row = first;
    end = first + rows;
    share = static_cast<int>((rows + steps - 1) / steps);
  }
  void operator()() {
    if (row == end) return;
    const int rows = share < end - row ? share : end - row;
    finish(row, rows);
    row += rows;
  }
  void flush() {
    while (row < end) (*this)();
  }
};

// Rows m .. of x, more than one pass, by the blocks of a task: `tiles` of k each, `block` bytes apart. sums, up_sums:
// [rows][2][16]. ends: begin(row, rows) before a pass, finish(row, rows, sums, up_sums) makes outputs of complete ones.
template <class Tiles, class Ends>
inline void multiply_task(const StagedX& x, int64_t m, int rows, const TaskBlocks& blocks, int64_t tiles, int64_t block,
                          float* sums, float* up_sums, const Ends& ends) {
  constexpr int kRow = 2 * kBlockN;
  const int64_t second = blocks.count == 2 ? block : 0;
  const int64_t pieces = (tiles + kManyPieceTiles - 1) / kManyPieceTiles, piece = (tiles + pieces - 1) / pieces;
  const int passes = (rows + kPassRows - 1) / kPassRows;
  // A pass's sums wait in rows of their own; where nothing follows but their outputs two places in L1 take turns.
  const bool wait = pieces > 1, gates_wait = wait || blocks.up;
  const auto place = [](float* from, int row, bool waits) {
    return from + (waits ? row : row % (2 * kPassRows)) * kRow;
  };
  const auto finish = [&](int row, int count) {
    ends.finish(row, count, place(sums, row, gates_wait), place(up_sums, row, wait));
  };
  Pending<decltype(finish)> pending{finish};
  for (const uint8_t* w : {blocks.w, blocks.up}) {
    if (!w) continue;
    const bool gates = blocks.up && w == blocks.w, up = w == blocks.up;
    const WeightStream stream{w, gates ? blocks.up : blocks.next, block, second};
    for (int64_t t = 0; t < tiles; t += piece) {
      const int64_t steps = lesser(piece, tiles - t);
      const Panel panel = stream.panel(t * kTileBytes, kTileBytes, steps);
      for (int r = 0; r < rows; r += kPassRows) {
        const int ready = static_cast<int>(lesser(kPassRows, rows - r));
        const Fetch fetch(panel, r / kPassRows, passes);
        char* to = reinterpret_cast<char*>(up ? place(up_sums, r, wait) : place(sums, r, gates_wait));
        const char* a = x.at(m + r, t);
        if (t == 0 && !gates) ends.begin(r, ready);
        if (ready > kTileRows) {
          multiply_many<Tiles>(a, x.row16, panel, fetch, to, t > 0, pending);
        } else {
          multiply<Tiles, 1, false>(a, x.row16, panel, fetch, to, t > 0);
        }
        pending.flush();
        if (!gates && t + steps == tiles) pending.add(r, ready, steps);
      }
    }
  }
  pending.flush();
}

}  // namespace radix::cpu::RK_ISA

#endif
