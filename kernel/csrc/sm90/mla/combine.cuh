// The split-KV reduction of the kernels on wgmma: the partial results that runs leave in the workspace, and their sum
// once all runs are done.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "sm90/common/convert.cuh"
#include "sm90/common/mbarrier.cuh"
#include "sm90/common/pdl.cuh"
#include "sm90/common/split_state.cuh"
#include "sm90/mla/run.cuh"

namespace radix::mla {

using sm90::round_pair;
using split_kv::exp2_diff;

constexpr int kMaxRuns = split_kv::kMaxBlocks;

// The query block that a run began and did not finish; each of the runs that go on with it leaves a partial result.
struct alignas(16) PendingBlock {
  int q_begin, packed, rows;  // as in Segment; query rows in use
  int partials;               // 0: there is none
};
constexpr int64_t kPendingBytes = (kMaxRuns * int64_t{sizeof(PendingBlock)} + 1023) / 1024 * 1024;

// A partial result in the workspace, behind the records: O relative to 2^m, and for each row (m, l).
template <int kRows>
constexpr int64_t kPartialBytes = kRows * (kLatent * 4 + 8);
template <int kRows>
constexpr int64_t kWorkspaceBytes = kPendingBytes + 2 * kMaxRuns * kPartialBytes<kRows>;

__device__ inline float* partial_row(char* partial, int row) {
  return reinterpret_cast<float*>(partial) + row * kLatent;
}
template <int kRows>
__device__ inline float2& partial_sums(char* partial, int row) {
  return reinterpret_cast<float2*>(partial + kRows * kLatent * 4)[row];
}
// The partial result that block `block` of the grid leaves of a query block that it began, or else entered.
template <int kRows>
__device__ inline char* partial_of(const WgmmaArgs& a, int block, bool began) {
  return a.nodes + kPendingBytes + (int64_t{block} * 2 + began) * kPartialBytes<kRows>;
}
__device__ inline PendingBlock& pending_of(const WgmmaArgs& a, int run) {
  return reinterpret_cast<PendingBlock*>(a.nodes)[run];
}

__device__ inline PendingBlock begin(const WgmmaArgs& a, const Segment& s, const RunStart& run_start, int block_rows) {
  const int rows = min(block_rows, s.queries * a.group - s.packed);
  return {s.q_begin, s.packed, rows, run_start.run_of(s.from + s.count - 1) - run_start.run + 1};
}

// Natural log of the sum of exponentials; -inf where nothing was seen.
__device__ inline float natural_log(float m, float l) {
  return l == 0 ? -INFINITY : (m + log2f(l)) * 0.6931471805599453f;
}

// Partial results `skip`, skip + step, ... of row r of the query block that `run` began, summed in order; 4 dimensions
// a thread.
template <int kRows>
__device__ inline split_kv::Piece sum_partials(const WgmmaArgs& a, const PendingBlock& b, int run, int r, int skip,
                                               int step) {
  using split_kv::Piece;
  constexpr int kAhead = 8;
  const int dim = threadIdx.x % 128 * 4;
  Piece sum = {make_float4(0.f, 0.f, 0.f, 0.f), -INFINITY, 0.f};
  for (int first = skip; first < b.partials; first += kAhead * step) {
    Piece ahead[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; n++) {
      const int at = first + n * step;
      ahead[n] = {make_float4(0.f, 0.f, 0.f, 0.f), -INFINITY, 0.f};
      if (at >= b.partials) continue;
      char* partial = partial_of<kRows>(a, (run + at) * a.cluster + r / kRows, at == 0);
      ahead[n].o = *reinterpret_cast<const float4*>(partial_row(partial, r % kRows) + dim);
      const float2 ml = partial_sums<kRows>(partial, r % kRows);
      ahead[n].m = ml.x, ahead[n].l = ml.y;
    }
#pragma unroll
    for (int n = 0; n < kAhead; n++)
      if (first + n * step < b.partials) sum = split_kv::join(sum, ahead[n]);
  }
  return sum;
}

// Joins the partial results of query blocks that several runs worked on, after all blocks of the grid have left theirs.
// The blocks take units in a round-robin: a row for each group of 128 threads, or, where there are many, one row for
// all groups. All kThreads threads; `raw`: the block's shared memory; `block_barrier`: a barrier of all threads behind
// it.
template <class T, int kRows, int kThreads, int kSharedBytes>
__device__ void combine(const WgmmaArgs& a, const RunStart& run_start, char* raw, uint64_t* block_barrier) {
  using split_kv::Piece;
  constexpr int kGroups = kThreads / 128, kManyPartials = 8;
  struct Shared {
    PendingBlock pending[kMaxRuns];
    int last[kMaxRuns];  // of a run's units, plus 1, counted from the first run on
    Piece slices[kGroups][128];
  };
  static_assert(kThreads % 128 == 0, "128 threads have the 512 latent dimensions of a row");
  static_assert(sizeof(Shared) <= kSharedBytes, "the combine reuses the kernel's shared memory");
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  // Not __syncthreads(), which racecheck does not follow behind the roles' partial barriers.
  auto sync_block = [block_barrier, parity = 0u]() mutable {
    sm90::barrier_arrive(block_barrier);
    sm90::barrier_wait(block_barrier, parity);
    parity ^= 1;
  };
  cooperative_groups::this_grid().sync();
  const int runs = gridDim.x / (a.cluster * run_start.halves);
  if (threadIdx.x < 32) {
    constexpr int kEach = (kMaxRuns + 31) / 32;
    const int first = threadIdx.x * kEach;
    PendingBlock mine[kEach];
    int units[kEach], sum = 0;
#pragma unroll
    for (int e = 0; e < kEach; e++) mine[e] = first + e < runs ? pending_of(a, first + e) : PendingBlock{};
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const PendingBlock& b = mine[e];
      units[e] = b.partials == 0 ? 0 : b.partials > kManyPartials ? b.rows : (b.rows + kGroups - 1) / kGroups;
      sum += units[e];
    }
    int last = sum;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, last, step);
      if (threadIdx.x >= step) last += before;
    }
    last -= sum;
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      last += units[e];
      if (first + e < runs) shared.pending[first + e] = mine[e], shared.last[first + e] = last;
    }
  }
  sync_block();
  const int group = threadIdx.x / 128, lane = threadIdx.x % 128;
  int run = 0;
  for (int unit = blockIdx.x; unit < shared.last[runs - 1]; unit += gridDim.x) {
    while (unit >= shared.last[run]) run++;
    const PendingBlock& b = shared.pending[run];
    const bool many = b.partials > kManyPartials;
    const int within = unit - (run > 0 ? shared.last[run - 1] : 0), r = many ? within : within * kGroups + group;
    Piece sum{};
    if (r < b.rows) sum = sum_partials<kRows>(a, b, run, r, many ? group : 0, many ? kGroups : 1);
    if (many) {
      shared.slices[group][lane] = sum;
      sync_block();
      for (int g = 1; g < kGroups; g++) sum = split_kv::join(sum, shared.slices[g][lane]);
      sync_block();
    }
    if (r >= b.rows || (many && group > 0)) continue;
    const attention::Params& p = a.p;
    const int64_t token = b.q_begin + (b.packed + r) / a.group, head = (b.packed + r) % a.group;
    const float by = sum.l == 0 ? 0.f : 1.f / sum.l;
    T* out = static_cast<T*>(p.out) + token * p.out_token + head * p.out_head + lane * 4;
    *reinterpret_cast<uint2*>(out) = {round_pair<T>(sum.o.x * by, sum.o.y * by),
                                      round_pair<T>(sum.o.z * by, sum.o.w * by)};
    if (p.lse && lane == 0) p.lse[token * p.lse_token + head * p.lse_head] = natural_log(sum.m, sum.l);
  }
}

// Blocks of a launch: one an SM, so that all of them run at once.
inline unsigned blocks_of(const WgmmaArgs& a) {
  return std::min(kMaxRuns, gpu::multiprocessors(a.p.device)) / (a.cluster * a.halves) * (a.cluster * a.halves);
}

}  // namespace radix::mla
