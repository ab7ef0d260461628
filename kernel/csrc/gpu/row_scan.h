// The one pass over all logits: many blocks a row, each one tile. What it leaves in the workspace decides the row in
// row_finish.h.
//   greedy      the tile's best word (value, id)
//   unfiltered  a word (score, id) that is the tile's best unless the best bound of its other ids reaches it
//   filtered    the largest of each group of 128 ids, and its mass where the row's mass is needed
// and, for log-probabilities, largest and mass of each group of the logits as they were given.
#pragma once

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

// Of a tile, or of the groups that 32 lanes have read.
struct Best {
  uint64_t word;  // (value, id) or (score, id), in between (bound, quad of ids); 0: none
  float second;   // unfiltered: no score of another quad passes this bound
  float largest;  // of the edited logits; NaN when one is
};

struct Scratch {
  Best* best;         // [rows, tiles]
  GroupStats edited;  // [rows, groups]
  GroupStats given;   // [rows, groups]
  int64_t tiles, groups;
  int64_t tile_groups;

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

struct Least {
  __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return a < b ? a : b; }
};

// Over the 32 lanes of a part; every lane gets the result.
template <class T, class Op>
__device__ inline T reduce_part(T value, Op op) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value = op(value, shuffle_xor(value, mask));
  return value;
}

// Greedy: the largest and the lowest id that has it.
template <int kCount>
__device__ Best scan_greedy(const Quad (&v)[kCount], int64_t group, const Draw& draw) {
  float mine = -INFINITY;
#pragma unroll
  for (int j = 0; j < kCount; j++) mine = MaxOrNan()(mine, largest_of(v[j]));
  const float largest = reduce_part(mine, MaxOrNan());
  uint32_t id = UINT32_MAX;
  if (mine == largest) {
    const uint32_t first = draw.first_id + static_cast<uint32_t>(group * kGroup + threadIdx.x % kLanes * 4);
#pragma unroll
    for (int j = kCount - 1; j >= 0; j--) {
#pragma unroll
      for (int i = 3; i >= 0; i--)
        if (v[j].at[i] == largest) id = first + j * kGroup + i;
    }
  }
  id = reduce_part(id, Least());
  return {largest > -INFINITY ? order_word(largest, id) : 0, -INFINITY, largest};
}

// Unfiltered: the quad of ids with the best bound on a score. A bound costs an id one fast logarithm. `logits` become
// those of the lane's own best quad.
template <int kCount>
__device__ Best scan_unfiltered(const Quad (&v)[kCount], int64_t group, const Draw& draw, int64_t b, Quad& logits) {
  constexpr int kTogether = kCount < 4 ? kCount : 4;
  const float slope = draw.slope(b);
  const auto seed = static_cast<uint64_t>(draw.seed[b]);
  const auto position = static_cast<uint32_t>(draw.position[b]);
  const uint32_t first = draw.first_id / 4 + static_cast<uint32_t>(group * kLanes + threadIdx.x % kLanes);
  float highest = -INFINITY, top = -INFINITY, second = -INFINITY;
  uint32_t quad = first;
  logits = v[0];
#pragma unroll
  for (int j = 0; j < kCount; j += kTogether) {
    PhiloxBlock words[kTogether];
    philox_each<kTogether>(seed, first + j * kLanes, kLanes, position, draw.stream, words);
#pragma unroll
    for (int k = 0; k < kTogether; k++) {
      float bound = -INFINITY;
#pragma unroll
      for (int i = 0; i < 4; i++) bound = fmaxf(bound, score_bound(v[j + k].at[i], slope, words[k].word[i]));
      highest = MaxOrNan()(highest, largest_of(v[j + k]));
      second = fmaxf(second, fminf(top, bound));
      if (bound > top) {
        quad = first + (j + k) * kLanes;
        logits = v[j + k];
      }
      top = fmaxf(top, bound);
    }
  }
  highest = reduce_part(highest, MaxOrNan());
  const float best = reduce_part(top, Max());
  const uint32_t winner = reduce_part(top == best ? quad : UINT32_MAX, Least());
  second = reduce_part(quad == winner ? second : top, Max());
  return {best > -INFINITY ? order_word(best, winner) : 0, second, highest};
}

// The best word (score, id) of a quad that all 32 lanes name and one of them holds.
__device__ inline uint64_t score_quad(const Quad& mine, const Draw& draw, int64_t b, uint32_t quad) {
  const int owner = static_cast<int>((quad - draw.first_id / 4) % kLanes), i = threadIdx.x % 4;
  float logit = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float x = shuffle_from(mine.at[k], owner);
    logit = k == i ? x : logit;
  }
  const uint32_t id = quad * 4 + i;
  const uint64_t word = logit > -INFINITY ? order_word(draw.score(b, logit / draw.divisor(b), id), id) : 0;
  const uint64_t other = MaxWord()(word, shuffle_from(word, (threadIdx.x ^ 1) % kLanes));
  return MaxWord()(other, shuffle_from(other, (threadIdx.x ^ 2) % kLanes));
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
  const Kind kind = s.draw.kind(b);
  if (kind == Kind::filtered)
    return write_stats<kCount>(v, kLog2e / s.draw.divisor(b), s.draw.needs_mass(b),
                               s.scratch.of_row(s.scratch.edited, b), group, s.scratch.groups);
  __shared__ Best best_of[kScanParts];
  Quad logits;
  const int part = threadIdx.x / kLanes;
  Best mine = kind == Kind::greedy ? scan_greedy<kCount>(v, group, s.draw)
                                   : scan_unfiltered<kCount>(v, group, s.draw, b, logits);
  if (threadIdx.x % kLanes == 0) best_of[part] = mine;
  __syncthreads();
  // The part that has the best goes on alone.
  int winner = 0;
  float second = -INFINITY;
#pragma unroll
  for (int p = 0; p < kScanParts; p++) {
    const Best other = best_of[p];
    if (other.word > best_of[winner].word) winner = p;
    mine.largest = MaxOrNan()(mine.largest, other.largest);
    second = fmaxf(second, other.second);
  }
  if (part != winner) return;
  if (kind == Kind::unfiltered && mine.word) {
#pragma unroll
    for (int p = 0; p < kScanParts; p++)
      if (p != winner && best_of[p].word) second = fmaxf(second, value_of(best_of[p].word));
    mine.word = score_quad(logits, s.draw, b, id_of(mine.word));
  }
  mine.second = second;
  if (threadIdx.x % kLanes == 0) s.scratch.best[b * s.scratch.tiles + tile] = mine;
}

}  // namespace radix::gpu
