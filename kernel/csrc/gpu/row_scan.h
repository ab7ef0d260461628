// The one pass over all logits: many blocks a row, each one tile. What it leaves in the workspace decides the row in
// row_finish.h.
//   greedy      the tile's best word (value, id)
//   unfiltered  the tile's best word (score, id): noise for every id, exact scores only where a bound could win
//   filtered    the largest of each group of 128 ids, and its mass where the row's mass is needed
// and, for log-probabilities, largest and mass of each group of the logits as they were given.
#pragma once

#include <cfloat>

#include "gpu/draw.h"
#include "gpu/launch.h"
#include "gpu/reduce.h"

namespace radix::gpu {

constexpr int kScanThreads = 256;
constexpr int kScanParts = kScanThreads / kLanes;

// Largest and mass of each group of a row: mass in units of the largest, NaN and infinities as they come.
struct GroupStats {
  float *largest = nullptr, *mass = nullptr;
};

struct TileBest {
  uint64_t word;  // 0: none
  float largest;  // of the edited logits; NaN when one is
  uint32_t unused;
};

struct Scratch {
  TileBest* best;     // [rows, tiles]
  GroupStats edited;  // [rows, groups]
  GroupStats given;   // [rows, groups]
  int64_t tiles, groups;

  __device__ GroupStats of_row(const GroupStats& all, int64_t b) const {
    return {all.largest + b * groups, all.mass + b * groups};
  }
};

struct Scan {
  Matrix logits;
  Draw draw;
  Edits edits;
  Scratch scratch;
  bool draws, logprobs;  // what is asked for
};

// Reduces value[j] over the 32 lanes for each j at once; lane i returns that of j = i / (32 / kCount).
template <int kCount, class Op>
__device__ inline float reduce_each(float (&value)[kCount], Op op) {
  int mask = kLanes / 2;
#pragma unroll
  for (int n = kCount / 2; n > 0; n /= 2, mask /= 2) {
    const bool upper = threadIdx.x & mask;
#pragma unroll
    for (int i = 0; i < n; i++) {
      const float keep = upper ? value[i + n] : value[i], send = upper ? value[i] : value[i + n];
      value[i] = op(keep, shuffle_xor(send, mask));
    }
  }
#pragma unroll
  for (int m = kLanes / 2 / kCount; m > 0; m /= 2) value[0] = op(value[0], shuffle_xor(value[0], m));
  return value[0];
}

__device__ inline float largest_of(const Quad& q) {
  const MaxOrNan op;
  return op(op(q.at[0], q.at[1]), op(q.at[2], q.at[3]));
}

template <int kCount>
__device__ void write_stats(const Quad (&v)[kCount], float slope, bool wants_mass, const GroupStats& out, int64_t group,
                            int64_t groups) {
  constexpr int kEach = kLanes / kCount;  // lanes that hold one group's result
  const int lane = threadIdx.x % kLanes;
  const bool writes = lane % kEach == 0 && group + lane / kEach < groups;
  float part[kCount];
#pragma unroll
  for (int j = 0; j < kCount; j++) part[j] = largest_of(v[j]);
  const float largest = reduce_each<kCount>(part, MaxOrNan());
  if (writes) out.largest[group + lane / kEach] = largest;
  if (!wants_mass) return;
#pragma unroll
  for (int j = 0; j < kCount; j++) {
    const float top = shuffle_from(largest, j * kEach);
    part[j] = 0;
    if (top == -INFINITY) continue;
#pragma unroll
    for (int i = 0; i < 4; i++) part[j] += fast_exp2((v[j].at[i] - top) * slope);
  }
  const float mass = reduce_each<kCount>(part, Sum());
  if (writes) out.mass[group + lane / kEach] = mass;
}

template <class Op>
__device__ inline float reduce_scan_block(float value, Op op) {
  return block_reduce<kScanThreads>(value, op);
}

// Greedy: the tile's largest and the lowest id that has it.
template <int kCount>
__device__ void scan_greedy(const Quad (&v)[kCount], int64_t group, const Draw& draw, TileBest* out) {
  __shared__ unsigned long long best;
  if (threadIdx.x == 0) best = 0;
  float mine = -INFINITY;
#pragma unroll
  for (int j = 0; j < kCount; j++) mine = MaxOrNan()(mine, largest_of(v[j]));
  const float largest = reduce_scan_block(mine, MaxOrNan());  // its barrier also shows best
  if (mine == largest && largest > -INFINITY) {
    const uint32_t first = draw.first_id + static_cast<uint32_t>(group * kGroup + threadIdx.x % kLanes * 4);
    uint32_t id = 0;
#pragma unroll
    for (int j = kCount - 1; j >= 0; j--) {
#pragma unroll
      for (int i = 3; i >= 0; i--)
        if (v[j].at[i] == largest) id = first + j * kGroup + i;
    }
    atomicMax(&best, static_cast<unsigned long long>(order_word(largest, id)));
  }
  __syncthreads();
  if (threadIdx.x == 0) *out = {best, largest, 0};
}

// Quads that may hold the best score, evaluated four threads each.
struct Contest {
  static constexpr int kSeats = kScanThreads / 4;
  unsigned long long best;
  int seated;
  Quad logits[kSeats];
  uint32_t block[kSeats];
};

// Unfiltered: the tile's best score and its id. A bound on each quad's scores costs a logarithm an id; the exact score,
// two precise logarithms and a division, is computed for the quads whose bound reaches the best exact score so far:
// first that with the best bound, then the few that could beat it.
template <int kCount>
__device__ void scan_unfiltered(const Quad (&v)[kCount], int64_t group, const Draw& draw, int64_t b, TileBest* out) {
  __shared__ Contest contest;
  const float temperature = draw.temperature[b], slope = fminf(kLog2e / temperature, FLT_MAX);
  const uint32_t first = draw.first_id / 4 + static_cast<uint32_t>(group * kLanes + threadIdx.x % kLanes);
  float bound[kCount], mine = -INFINITY, highest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kCount; j++) {
    const PhiloxBlock words = draw.words(b, first + j * kLanes);
    bound[j] = -FLT_MAX;  // a finite logit may overflow on its way into the bound
#pragma unroll
    for (int i = 0; i < 4; i++) bound[j] = fmaxf(bound[j], score_bound(v[j].at[i], slope, words.word[i]));
    mine = fmaxf(mine, bound[j]);
    highest = MaxOrNan()(highest, largest_of(v[j]));
  }
  highest = reduce_scan_block(highest, MaxOrNan());
  if (!(highest > -INFINITY)) {
    if (threadIdx.x == 0) *out = {0, highest, 0};
    return;
  }
  float floor = reduce_scan_block(mine, Max());
  if (threadIdx.x == 0) contest.best = 0;
  uint32_t done = 0;
  for (;;) {
    if (threadIdx.x == 0) contest.seated = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kCount; j++) {
      if (bound[j] < floor || done >> j & 1u) continue;
      const int seat = atomicAdd(&contest.seated, 1);
      if (seat >= Contest::kSeats) continue;  // it stays for the next round
      contest.logits[seat] = v[j];
      contest.block[seat] = first + j * kLanes;
      done |= 1u << j;
    }
    __syncthreads();
    const int seat = threadIdx.x / 4, i = threadIdx.x % 4;
    if (seat < contest.seated && contest.logits[seat].at[i] > -INFINITY) {
      const uint32_t id = contest.block[seat] * 4 + i;
      const float score = draw.score(b, contest.logits[seat].at[i] / temperature, id);
      atomicMax(&contest.best, static_cast<unsigned long long>(order_word(score, id)));
    }
    const int seated = contest.seated;
    __syncthreads();
    const uint64_t best = contest.best;
    if (seated == 0) {
      if (threadIdx.x == 0) *out = {best, highest, 0};
      return;
    }
    const float score = value_of(best);
    floor = best == 0 ? -FLT_MAX : (score - bound_margin(score)) / kLn2;
  }
}

template <int kCount, bool kEdits>
__global__ void __launch_bounds__(kScanThreads, 4) scan_kernel(const RK_PARAMETER Scan s) {
  wait_for_previous();
  const int64_t b = blockIdx.x / s.scratch.tiles, tile = blockIdx.x % s.scratch.tiles;
  const int64_t group = (tile * kScanParts + threadIdx.x / kLanes) * kCount;
  const Row<kEdits> row(s.logits, b, 1.f, s.edits);
  Quad v[kCount];
  row.template load<kCount>(group, v);
  if (s.logprobs) write_stats<kCount>(v, kLog2e, true, s.scratch.of_row(s.scratch.given, b), group, s.scratch.groups);
  if (!s.draws) return;
  row.template edit<kCount>(group, v);
  TileBest* best = s.scratch.best + b * s.scratch.tiles + tile;
  switch (s.draw.kind(b)) {
    case Kind::greedy: return scan_greedy<kCount>(v, group, s.draw, best);
    case Kind::unfiltered: return scan_unfiltered<kCount>(v, group, s.draw, b, best);
    case Kind::filtered:
      return write_stats<kCount>(v, kLog2e / s.draw.temperature[b], s.draw.needs_mass(b),
                                 s.scratch.of_row(s.scratch.edited, b), group, s.scratch.groups);
  }
}

}  // namespace radix::gpu
