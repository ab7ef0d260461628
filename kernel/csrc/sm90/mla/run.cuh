// A batch as one line of tiles of 64 tokens, row after row and within a row query block after query block, cut evenly
// into runs. A run is what a block (or a cluster) works on; it begins and ends anywhere in a row:
//
//   rows      |----- row 0 -----|-- row 1 --|- row 2 -|------- row 3 -------|
//   runs      |   run 0   |   run 1   |   run 2   |   run 3   | ...
//
// What a run has of a query block is a segment. A segment that is not all of it becomes a partial result in the
// workspace, of which a run leaves two at most: of the block that it enters in the middle, and of the one that it
// begins last.
//
// Where all rows are of one length, two blocks of a cluster may share a run: each has half of every segment's tiles,
// and they join through shared memory. So there are fewer cuts, often none. Rows of other lengths make more segments,
// and more joins.
#pragma once

#include "sm90/mla/mla.cuh"

namespace radix::mla {

constexpr int kTile = 64;
static_assert(kTile == sm90::kWgmmaRows, "tokens are the rows of the swapped products, and N of the others");
constexpr int kMinTiles = 4;  // of a run: shorter ones cost more to join than they save

// One row of the batch in the line.
struct Row {
  int q_begin, queries, kv_len;
  int tiles;  // of one query block: one at least, for the row has an output
  int count;  // of all

  __device__ Row(const WgmmaArgs& a, int row, int block_rows) {
    q_begin = a.p.cu_q[row], queries = a.p.cu_q[row + 1] - q_begin, kv_len = max(a.p.kv_lens[row], 0);
    tiles = max(1, (kv_len + kTile - 1) / kTile);
    count = queries > 0 ? tiles * ((queries * a.group + block_rows - 1) / block_rows) : 0;
  }
};

// Where the line is cut, and where one run begins.
struct RunStart {
  int total;         // tiles of the line
  int runs;          // in use
  int run;           // that begins here
  int halves, half;  // 2 where blocks share a run, and which half this one has
  int row, before;   // the row where it begins, tiles before that row
  bool whole;        // no cut lies within a query block, so nothing is left to join

  // The first tile of a run: floor(total * run / runs).
  __device__ int start(int run) const {
    const int each = total / runs, rest = total - each * runs;
    return run * each + run * rest / runs;
  }
  // The run that has tile x.
  __device__ int run_of(int x) const { return static_cast<int>((static_cast<int64_t>(x + 1) * runs - 1) / total); }
};

// Runs in use of `most`: none shorter than kMinTiles. If all rows are alike, as many as cut them into equal parts or
// none, unless that leaves more than 1 of 16 idle.
__device__ inline int runs_for(const WgmmaArgs& a, int total, int tiles, bool alike, int most) {
  const int runs = max(1, min(most, total / kMinTiles));
  if (!alike || tiles == 0) return runs;
  const int blocks = total / tiles, each = (blocks + runs - 1) / runs;
  const int even = blocks <= runs ? runs / blocks * blocks : (blocks + each - 1) / each;
  return even * 16 >= runs * 15 ? even : runs;
}

// Where this block's run begins. All kThreads threads of the block; scratch: kThreads / 32 + 2 ints of shared memory.
template <int kThreads>
__device__ RunStart find_start(const WgmmaArgs& a, int block_rows, int* scratch) {
  static_assert(kThreads % 32 == 0 && kThreads <= sm90::kMaxThreads, "a prefix sum over whole warps");
  const int thread = threadIdx.x, lane = thread % 32, batch = static_cast<int>(a.p.batch);
  const int per_thread = (batch + kThreads - 1) / kThreads;
  const int first = min(thread * per_thread, batch), last = min(first + per_thread, batch);
  const Row one(a, 0, block_rows);
  bool alike = true;
  int sum = 0;
  for (int row = first; row < last; row++) {
    const Row r(a, row, block_rows);
    sum += r.count;
    alike &= r.count == one.count && r.tiles == one.tiles;
  }
  int before = sum;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) scratch[thread / 32] = before;
  alike = __syncthreads_and(alike);
  before -= sum;
  RunStart run_start{};
  for (int w = 0; w < kThreads / 32; w++) {
    if (w < thread / 32) before += scratch[w];
    run_start.total += scratch[w];
  }
  run_start.halves = alike ? a.halves : 1;
  run_start.half = blockIdx.x % run_start.halves;
  run_start.run = blockIdx.x / (a.cluster * run_start.halves);
  run_start.runs = runs_for(a, run_start.total, one.tiles, alike, gridDim.x / (a.cluster * run_start.halves));
  run_start.whole = alike && run_start.total / one.tiles % run_start.runs == 0;
  const int x = run_start.start(min(run_start.run, run_start.runs));
  if (before <= x && x < before + sum) {
    int row = first;
    for (;; row++) {
      const int count = Row(a, row, block_rows).count;
      if (x < before + count) break;
      before += count;
    }
    scratch[kThreads / 32] = row, scratch[kThreads / 32 + 1] = before;
  }
  __syncthreads();
  run_start.row = scratch[kThreads / 32], run_start.before = scratch[kThreads / 32 + 1];
  return run_start;
}

// What a run has of one query block, of `count` tiles in all; where two blocks share the run, what this one has.
struct Segment {
  int row, q_begin, queries, kv_len;
  int packed;        // first query row of the block; packed row r is token r / group, head r % group
  int from;          // the block's first tile in the line
  int first, tiles;  // tiles [first, first + tiles)
  int count;
  bool begun, ended;  // the run has the first tile, the last one
  bool halved;        // the cluster's other block has tiles of it too

  __device__ bool complete() const { return begun && ended; }
};

// The segments of a block's run, in order. Of a single tile the first half has it.
class Walk {
 public:
  // A run that is not in use has none.
  __device__ Walk(const WgmmaArgs& a, int block_rows, const RunStart& at)
      : a_(a),
        block_rows_(block_rows),
        halves_(at.halves),
        half_(at.half),
        x_(at.start(min(at.run, at.runs))),
        x_end_(at.start(min(at.run + 1, at.runs))),
        row_(at.row),
        before_(at.before) {}

  __device__ bool next(Segment& s) {
    do {
      if (x_ >= x_end_) return false;
      Row row(a_, row_, block_rows_);
      while (x_ >= before_ + row.count) {
        before_ += row.count;
        row = Row(a_, ++row_, block_rows_);
      }
      const int within = x_ - before_, block = within / row.tiles, first = within - block * row.tiles;
      const int tiles = min(x_end_ - x_, row.tiles - first), left = halves_ > 1 ? (tiles + 1) / 2 : tiles;
      s = {row_, row.q_begin, row.queries, row.kv_len, block * block_rows_, x_ - first, first, left, row.tiles};
      s.begun = first == 0, s.ended = first + tiles == row.tiles, s.halved = left < tiles;
      if (half_ > 0) s.first += left, s.tiles = tiles - left;
      x_ += tiles;
    } while (s.tiles == 0);
    return true;
  }

 private:
  const WgmmaArgs& a_;
  int block_rows_, halves_, half_, x_, x_end_, row_, before_;
};

}  // namespace radix::mla
