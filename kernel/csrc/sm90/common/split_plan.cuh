// Paged decode: what its kernels and its host side share.
//
// The rows are cut into chunks of a power of two of tokens that begin at its multiples. How many tokens follows from
// the row's own length and, where a batch is small for the chip, from the number of its rows: what a chunk sums depends
// on nothing else. The chunks of all rows stand in one line, row after row; the line is cut evenly into `groups` runs,
// and a block works through one run for one KV head:
//
//   rows      |----- row 0 -----|-- row 1 --|- row 2 -|------- row 3 -------|
//   runs      |   group 0   |   group 1   |   group 2   |   group 3   | ...
//
// Chunks are joined by a binary tree over their index within the row, the same tree wherever the runs are cut: a block
// joins what lies within its run and leaves the rest as nodes in the workspace for combine_kernel. A run leaves few
// nodes however long it is.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sm90/common/attention_params.cuh"
#include "sm90/common/limits.cuh"
#include "sm90/common/pdl.cuh"

namespace radix::split_kv {

using attention::Params;
using attention::Shape;

constexpr int kMaxRows = 1024;   // rows of the batch in one launch: their plan lies in shared memory
constexpr int kMaxBlocks = 132;  // groups x KV heads: one block an SM
constexpr int kMaxTileRows = 32;
constexpr int kChunkTokens = 512;   // fewer joins than with 256; a single short row splits less
constexpr int kShortChunkLog2 = 7;  // of short rows; twice that of longer ones
constexpr int kMaxVecDim = 256;
static_assert(sm90::is_power_of_two(kChunkTokens), "chunks begin at multiples of a shift");

struct Args {
  Params p;
  int first_row = 0, rows = 0;  // of the batch, in this launch
  int group = 0;                // query heads of a KV head
  int groups = 0;
  int chunk_log2 = 8;   // tokens of a chunk of a long row
  int short_row = 0;    // most tokens of a short row; 0: all are long
  int levels = 0;       // of the tree of the longest possible row
  int page_shift = -1;  // log2 of the page size, or -1
  char* nodes = nullptr;
};

// log2 of the tokens of a chunk of a row.
__host__ __device__ constexpr int row_chunk_log2(int64_t kv_len, int chunk_log2, int64_t short_row) {
  if (kv_len <= short_row) return kShortChunkLog2;
  return kv_len <= 2 * short_row ? kShortChunkLog2 + 1 : chunk_log2;
}

// Levels of the tree over the most chunks of a row that the page table can hold.
inline int levels_of(const Shape& s, int chunk_log2, int short_row = 0) {
  const int64_t longest = s.max_pages * s.page_size;
  int64_t chunks = 0;
  for (int64_t tokens : {longest, std::min<int64_t>(longest, short_row), std::min<int64_t>(longest, 2 * short_row)}) {
    const int log2 = row_chunk_log2(tokens, chunk_log2, short_row);
    chunks = std::max(chunks, (tokens + (int64_t{1} << log2) - 1) >> log2);
  }
  int levels = 1;
  while ((int64_t{1} << (levels - 1)) < chunks) levels++;
  return levels;
}

// Nodes that a block may leave: of the row that it enters in the middle, and of the one that it starts.
__host__ __device__ constexpr int nodes_of_block(int levels) {
  return 3 * levels;
}

// What the blocks know of the rows, in shared memory.
struct Plan {
  const int* prefix;  // [rows + 1] chunks before the row, each counted once for each block of its query rows
  const int* lo;      // [rows] tokens that any query of the row sees: [lo, hi)
  const int* hi;
  const int* q_begin;  // [rows + 1]
  int rows, chunk_log2, short_row;
  int each, over;  // chunks of every run, and how many are left then

  __device__ int chunks() const { return prefix[rows]; }
  // First chunk of a group's run: chunks * group / groups, without its division of 64 bits.
  __device__ int start(int group, int groups) const { return each * group + over * group / groups; }
  // The row that holds chunk x of the line.
  __device__ int row_of(int x) const {
    int low = 0, high = rows;
    while (low + 1 < high) {
      const int middle = (low + high) / 2;
      (prefix[middle] <= x ? low : high) = middle;
    }
    return low;
  }
};
constexpr int kPlanInts = 4 * kMaxRows + 2;
constexpr int kPlanBytes = (kPlanInts * 4 + 127) / 128 * 128;

// One chunk of the line.
struct Chunk {
  int row;
  int block;         // which kRows of the row's packed queries
  int index, count;  // among the row's chunks
  int begin, end;    // tokens
};

// Chunks of a row that sees tokens [lo, hi): one at least, for the row has an output.
__device__ inline int chunks_of(int lo, int hi, int chunk_log2) {
  return max(1, (hi + (1 << chunk_log2) - 1 >> chunk_log2) - (lo >> chunk_log2));
}

// row: a row at or before that of x; becomes that of x.
__device__ inline Chunk locate(const Plan& plan, int x, int& row) {
  while (x >= plan.prefix[row + 1]) row++;
  const int lo = plan.lo[row], hi = plan.hi[row], log2 = row_chunk_log2(hi, plan.chunk_log2, plan.short_row);
  const int count = chunks_of(lo, hi, log2), within = x - plan.prefix[row];
  const int block = within < count ? 0 : within / count, index = within - block * count;
  const int at = (lo >> log2) + index;
  return {row, block, index, count, max(lo, at << log2), min(hi, at + 1 << log2)};
}

// All threads of the block, kThreads of them; ends with a barrier.
template <int kThreads>
__device__ Plan make_plan(const Args& a, int tile_rows, int* shared) {
  static_assert(kThreads % 32 == 0 && kThreads <= sm90::kMaxThreads, "a prefix sum over whole warps");
  int* prefix = shared;
  int* lo = prefix + a.rows + 1;
  int* hi = lo + a.rows;
  int* q_begin = hi + a.rows;
  __shared__ int warp_sums[kThreads / 32];
  const int per_thread = (a.rows + kThreads - 1) / kThreads, thread = threadIdx.x, lane = thread % 32;
  const int group = a.group;
  int sum = 0;
  for (int i = 0; i < per_thread; i++) {
    const int row = thread * per_thread + i;
    if (row >= a.rows) break;
    const int begin = a.p.cu_q[a.first_row + row], queries = a.p.cu_q[a.first_row + row + 1] - begin;
    const int kv = max(a.p.kv_lens[a.first_row + row], 0);
    const int low = a.p.window_left < 0 ? 0 : max(0, kv - queries - a.p.window_left);
    const int chunks = chunks_of(low, kv, row_chunk_log2(kv, a.chunk_log2, a.short_row));
    const int count = queries > 0 ? chunks * ((queries * group + tile_rows - 1) / tile_rows) : 0;
    lo[row] = low, hi[row] = kv, q_begin[row] = begin, prefix[row + 1] = count;
    if (row + 1 == a.rows) q_begin[a.rows] = begin + queries;
    sum += count;
  }
  int before = sum;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) warp_sums[thread / 32] = before;
  __syncthreads();
  before -= sum;
  for (int w = 0; w < thread / 32; w++) before += warp_sums[w];
  for (int i = 0; i < per_thread; i++) {
    const int row = thread * per_thread + i;
    if (row >= a.rows) break;
    before += prefix[row + 1];
    prefix[row + 1] = before;
  }
  if (thread == 0) prefix[0] = 0;
  __syncthreads();
  const int line = prefix[a.rows];
  return {prefix, lo, hi, q_begin, a.rows, a.chunk_log2, a.short_row, line / a.groups, line % a.groups};
}

}  // namespace radix::split_kv
