// Passes over AMX tiles: bf16 x bf16 -> float32, int8 x int8 -> int32, 16 x 16 outputs and 64 bytes of k a tile.
//
// C tiles 0..3 (two of rows by two packed blocks), A tiles 4..5, B tiles 6..7. A tile sums over its k in one fixed
// order and tiles follow in ascending k, whatever the number of rows; between pieces of k C waits in memory, which
// changes no bit.
#pragma once

#include "cpu/tiles.h"

#if RK_HAS_PRODUCT_TILES

#include "cpu/linear/kernel_codes.h"

namespace radix::cpu::RK_ISA {

constexpr int kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
static_assert(kTileBytes == kTileRows * kLine && kTileRows == kBlockN, "a C tile is 16 rows by a packed block");

// rows: of the first A tile and its C tiles, 1 .. 16; step: bytes of k in a tile, 64 or 32.
class AmxScope {
 public:
  AmxScope(int rows, int step) {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) {
      const bool a = i == 4 || i == 5, b = i == 6 || i == 7, first = i == 0 || i == 1 || i == 4;
      shapes.bytes_per_row[i] = static_cast<uint16_t>(a ? step : 64);
      shapes.rows[i] = static_cast<uint8_t>(b ? step / 4 : first ? rows : kTileRows);
    }
    shapes.load();
  }
  ~AmxScope() { tile_release(); }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
};

// C tile 2 i + j += A tile 4 + i times B tile 6 + j.
struct Bf16Tiles {
  static void c00() { tile_dot<0, 4, 6>(); }
  static void c01() { tile_dot<1, 4, 7>(); }
  static void c10() { tile_dot<2, 5, 6>(); }
  static void c11() { tile_dot<3, 5, 7>(); }
};
struct Int8Tiles {
  static void c00() { tile_dot_int8<0, 4, 6>(); }
  static void c01() { tile_dot_int8<1, 4, 7>(); }
  static void c10() { tile_dot_int8<2, 5, 6>(); }
  static void c11() { tile_dot_int8<3, 5, 7>(); }
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

// Tiles of x, 4 or 5. kAround: around L1.
template <int T, bool kAround>
inline void load_x(const char* a) {
  if constexpr (kAround) {
    tile_stream_load<T, Order::kNone>(a, kLine);
  } else {
    tile_load<T, Order::kNone>(a, kLine);
  }
}

// How many rows read a panel, which decides what is worth a place in L1.
enum class Readers {
  kPass,  // those of one pass: the panel comes from memory now, its tiles are fetched into L1 like those of x
  kSome,
  kMany,  // the panel is a piece of k that stays in L1; x comes from L2 around it
};

struct Nothing {
  void operator()() const {}
};

// a: tiles of 16 rows, kTileBytes apart; those of the next 16 rows are `row16` further. c: [32][32] words. The loads of
// a step come together: each alone between products costs more on a CPU whose sibling thread is busy. Calls meanwhile()
// in every step.
template <class Tiles, int RowTiles, Readers kReaders, class Meanwhile>
inline void multiply(const char* a, int64_t row16, const Panel& panel, Fetch fetch, char* c, bool accumulate,
                     Meanwhile&& meanwhile) {
  constexpr int kStride = 2 * kBlockN * 4;
  constexpr bool kTwo = RowTiles == 2, kPass = kReaders == Readers::kPass, kMany = kReaders == Readers::kMany;
  char* c1 = c + kTileRows * kStride;
  asm volatile("" ::: "memory");  // operands may just have been written
  const char *b0 = panel.b0, *b1 = panel.b1;
  if (accumulate) {
    tile_load<0, Order::kNone>(c, kStride);
    if constexpr (kTwo) tile_load<2, Order::kNone>(c1, kStride);
    tile_load<1, Order::kNone>(c + 64, kStride);
    if constexpr (kTwo) tile_load<3, Order::kNone>(c1 + 64, kStride);
  } else {
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (kTwo) {
      tile_zero<2>();
      tile_zero<3>();
    }
  }
  for (int left = panel.steps; left > 0; left--) {
    load_x<4, kMany>(a);
    tile_load<6, Order::kNone>(b0, kLine);
    if constexpr (kTwo) load_x<5, kMany>(a + row16);
    tile_load<7, Order::kNone>(b1, kLine);
    a += kTileBytes;
    b0 += panel.step;
    b1 += panel.step;
    fetch.step();
    if constexpr (!kMany && !(kPass && !kTwo)) fetch_tile(a + kTilesAhead * kTileBytes);
    if constexpr (!kMany && kTwo) fetch_tile(a + row16 + kTilesAhead * kTileBytes);
    if constexpr (kPass) {
      fetch_tile(b0 + kTilesAhead * panel.step);
      fetch_tile(b1 + kTilesAhead * panel.step);
    }
    meanwhile();
    Tiles::c00();
    if constexpr (kTwo) Tiles::c10();
    Tiles::c01();
    if constexpr (kTwo) Tiles::c11();
  }
  tile_store<0, Order::kNone>(c, kStride);
  tile_store<1, Order::kNone>(c + 64, kStride);
  if constexpr (kTwo) {
    tile_store<2, Order::kNone>(c1, kStride);
    tile_store<3, Order::kNone>(c1 + 64, kStride);
  }
  asm volatile("" ::: "memory");
}

constexpr int kPassRows = 2 * kTileRows;
constexpr int64_t kPassBytes = kPassRows * 2 * kBlockN * 4;  // of sums

// The same for a pass of 1 to 32 rows.
template <class Tiles, Readers kReaders, class Meanwhile>
inline void multiply_pass(const char* a, int64_t row16, int rows, const Panel& panel, Fetch fetch, char* c,
                          bool accumulate, Meanwhile&& meanwhile) {
  if (rows > kTileRows) return multiply<Tiles, 2, kReaders>(a, row16, panel, fetch, c, accumulate, meanwhile);
  multiply<Tiles, 1, kReaders>(a, row16, panel, fetch, c, accumulate, meanwhile);
}

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
    if (rows > kPassRows) {
      multiply_pass<Tiles, Readers::kSome>(a, x.row16, ready, panel, fetch, to, accumulate, Nothing());
    } else {
      multiply_pass<Tiles, Readers::kPass>(a, x.row16, ready, panel, fetch, to, accumulate, Nothing());
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

// Weights that lie as tiles, in blocks of so many bytes, as a task reads them.
struct TilesInPlace {
  int64_t block;
  Panel panel(const WeightStream& stream, int64_t tile, int64_t steps) const {
    return stream.panel(tile * kTileBytes, kTileBytes, steps);
  }
};

// The blocks of a task: those of the gates or of all outputs, those of the up rows or NULL, and what the thread reads
// next, or NULL.
struct TaskBlocks {
  const uint8_t *w, *up, *next;
  int count;
};

// The rows of a pass whose sums wait to become outputs: a few at every step of the pass that follows, or at every
// kSteps-th one, so that the tiles do not wait for the vector units.
template <int kSteps, class Finish>
struct Pending {
  const Finish& finish;
  int row = 0, end = 0, share = 0, step = 0;

  void add(int first, int rows, int64_t steps) {
    row = first;
    end = first + rows;
    share = kSteps * static_cast<int>((rows + steps - 1) / steps);
  }
  void operator()() {
    if (row == end || ++step % kSteps != 0) return;
    const int rows = share < end - row ? share : end - row;
    finish(row, rows);
    row += rows;
  }
  void flush() {
    while (row < end) (*this)();
  }
};

// Rows m .. of x by the blocks of a task: `tiles` of k each, of which weights.panel() gives a piece at a time. sums,
// up_sums: [rows][2][16]. ends: fetch(row, rows) for all rows, evenly over the passes, begin(row, rows) before the last
// pass over rows, finish(row, rows, sums, up_sums) makes outputs of complete ones, at every kSteps-th step.
template <class Tiles, class Weights, class Ends>
inline void multiply_task(const StagedX& x, int64_t m, int rows, const TaskBlocks& blocks, int64_t tiles,
                          const Weights& weights, float* sums, float* up_sums, const Ends& ends) {
  constexpr int kRow = 2 * kBlockN;
  const int64_t second = blocks.count == 2 ? weights.block : 0;
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
  Pending<Ends::kSteps, decltype(finish)> pending{finish};
  for (const uint8_t* w : {blocks.w, blocks.up}) {
    if (!w) continue;
    const bool gates = blocks.up && w == blocks.w, up = w == blocks.up;
    const WeightStream stream{w, gates ? blocks.up : blocks.next, weights.block, second};
    for (int64_t t = 0; t < tiles; t += piece) {
      const int64_t steps = lesser(piece, tiles - t);
      const Panel panel = weights.panel(stream, t, steps);
      for (int r = 0; r < rows; r += kPassRows) {
        const int ready = static_cast<int>(lesser(kPassRows, rows - r));
        const Fetch fetch(panel, r / kPassRows, passes);
        char* to = reinterpret_cast<char*>(up ? place(up_sums, r, wait) : place(sums, r, gates_wait));
        const char* a = x.at(m + r, t);
        if (!gates) {
          const int64_t pass = t / piece * passes + r / kPassRows, all = pieces * passes, first = rows * pass / all;
          ends.fetch(first, rows * (pass + 1) / all - first);
          if (t + steps == tiles) ends.begin(r, ready);
        }
        multiply_pass<Tiles, Readers::kMany>(a, x.row16, ready, panel, fetch, to, t > 0, pending);
        pending.flush();
        if (!gates && t + steps == tiles) pending.add(r, ready, steps);
      }
    }
  }
  pending.flush();
}

}  // namespace radix::cpu::RK_ISA

#endif
