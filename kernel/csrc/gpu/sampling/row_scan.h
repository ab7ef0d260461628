// The one pass over all logits: many blocks a row, each one tile. What it leaves in the workspace decides the row in
// row_finish.h.
//   greedy      of each part the best word (value, id)
//   unfiltered  of each part the quad of ids whose scores have the best bound, and what bounds all others
//   filtered    the largest of each group of 128 ids; where top-p acts alone its mass, and the quads as if unfiltered
// and, for log-probabilities, largest and mass of each group of the logits as they were given.
#pragma once

#include "gpu/device/launch.h"
#include "gpu/device/reduce.h"
#include "gpu/sampling/draw.h"

namespace radix::gpu {

constexpr int kScanThreads = 256;
constexpr int kScanBlocks = 4;  // on a multiprocessor at a time
constexpr int kScanParts = kScanThreads / kLanes;

// A bound of less is of logits that are finite, divided by their temperature too.
constexpr float kModerate = 1e8f;

// Largest and mass of each group of a row: mass in units of the largest, NaN and infinities as they come.
struct GroupStats {
  float *largest = nullptr, *mass = nullptr;
};

// Of a part: the groups that 32 lanes have read.
struct Best {
  uint64_t word;  // greedy: (value, id); unfiltered: (bound, quad of ids); 0: none
  float second;   // unfiltered: no score of another quad passes this bound
  float largest;  // of the edited logits; NaN when one is. Unfiltered: 0 for any that overflows nowhere
};

struct Scratch {
  Best* best;         // [rows, parts]
  GroupStats edited;  // [rows, groups]
  GroupStats given;   // [rows, groups]
  int64_t tiles, parts, groups;
  int64_t part_groups;
  bool proposes;  // `best` of rows too whose only number is top-p's

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
  return reduce_lanes<kLanes / 2>(value, op);
}

__device__ inline uint64_t best_of_part(uint64_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const auto high = static_cast<uint32_t>(word >> 32), low = static_cast<uint32_t>(word);
  const uint32_t highest = __reduce_max_sync(0xffffffffu, high);
  return uint64_t{highest} << 32 | __reduce_max_sync(0xffffffffu, high == highest ? low : 0);
#else
  return reduce_part(word, MaxWord());
#endif
}

__device__ inline uint32_t least_of_part(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_min_sync(0xffffffffu, x);
#else
  return reduce_part(x, Least());
#endif
}

// NaN when one is (of a positive sign, as MaxOrNan's are).
__device__ inline float largest_of_part(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return value_of(__reduce_max_sync(0xffffffffu, order_key(x)));
#else
  return reduce_part(x, MaxOrNan());
#endif
}

// Greedy: the largest and the lowest id that has it.
template <int kCount>
__device__ Best scan_greedy(const Quad (&v)[kCount], int64_t group, uint32_t first_id) {
  float mine = -INFINITY;
#pragma unroll
  for (int j = 0; j < kCount; j++) mine = MaxOrNan()(mine, largest_of(v[j]));
  const float largest = largest_of_part(mine);
  uint32_t id = UINT32_MAX;
  if (mine == largest) {
    const uint32_t first = first_id + static_cast<uint32_t>(group * kGroup + threadIdx.x % kLanes * 4);
#pragma unroll
    for (int j = kCount - 1; j >= 0; j--) {
#pragma unroll
      for (int i = 3; i >= 0; i--)
        if (v[j].at[i] == largest) id = first + j * kGroup + i;
    }
  }
  id = least_of_part(id);
  return {largest == -INFINITY ? 0 : order_word(largest, id), -INFINITY, largest};
}

// Unfiltered: the quad of ids with the best bound on a score. A bound costs an id one fast logarithm.
template <int kCount>
__device__ Best scan_unfiltered(const Quad (&v)[kCount], int64_t group, uint32_t first_id, const RowDraw& draw,
                                uint32_t stream) {
  constexpr int kTogether = kCount < 4 ? kCount : 4;
  const float slope = draw.slope();
  const uint32_t first = first_id / 4 + static_cast<uint32_t>(group * kLanes + threadIdx.x % kLanes);
  float top = -INFINITY, second = -INFINITY;
  uint32_t quad = first;
#pragma unroll
  for (int j = 0; j < kCount; j += kTogether) {
    PhiloxBlock words[kTogether];
    philox_each<kTogether>(draw.seed, first + j * kLanes, kLanes, draw.position, stream, words);
#pragma unroll
    for (int k = 0; k < kTogether; k++) {
      float bound[4];
#pragma unroll
      for (int i = 0; i < 4; i++) bound[i] = score_bound(v[j + k].at[i], slope, words[k].word[i]);
      const MaxOrNan larger;
      const float best = larger(larger(bound[0], bound[1]), larger(bound[2], bound[3]));
      second = fmaxf(second, fminf(top, best));
      if (best > top) quad = first + (j + k) * kLanes;
      top = larger(top, best);
    }
  }
  const float best = largest_of_part(top);
  const uint32_t winner = least_of_part(top == best ? quad : UINT32_MAX);
  second = largest_of_part(quad == winner ? second : top);
  Best found{best > -INFINITY ? order_word(best, winner) : 0, second, 0};
  if (fabsf(best) < kModerate && draw.is_moderate()) return found;
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kCount; j++) largest = MaxOrNan()(largest, largest_of(v[j]));
  found.largest = largest_of_part(largest);
  if (isnan(best)) found.second = INFINITY;  // by a NaN, or by a word 0 of an id that is out
  return found;
}

template <int kCount, bool kEdits>
__global__ void __launch_bounds__(kScanThreads, kScanBlocks) scan_kernel(const RK_PARAMETER Scan s) {
  wait_for_previous();
  const int64_t b = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const int part = static_cast<int>(blockIdx.x) * kScanParts + static_cast<int>(threadIdx.x) / kLanes;
  if (b >= s.logits.rows || part >= s.scratch.parts) return;
  const int group = part * kCount;
  const Row<kEdits> row(s.logits, b, 1.f, s.edits);
  Quad v[kCount];
  row.template load<kCount, true>(group, v);
  RowDraw draw;
  if (s.draws) draw = s.draw.of_row(b);
  if (s.logprobs) write_stats<kCount>(v, kLog2e, true, s.scratch.of_row(s.scratch.given, b), group, s.scratch.groups);
  if (!s.draws) return;
  row.template edit<kCount>(group, v);
  const Kind kind = draw.kind(s.draw.vocabulary);
  if (kind == Kind::filtered) {
    const bool needs_mass = draw.needs_mass(s.draw.vocabulary);
    write_stats<kCount>(v, kLog2e / draw.divisor(), needs_mass, s.scratch.of_row(s.scratch.edited, b), group,
                        s.scratch.groups);
    if (!needs_mass || !s.scratch.proposes) return;
  }
  const Best mine = kind == Kind::greedy ? scan_greedy<kCount>(v, group, s.draw.first_id)
                                         : scan_unfiltered<kCount>(v, group, s.draw.first_id, draw, s.draw.stream);
  if (threadIdx.x % kLanes == 0) s.scratch.best[b * s.scratch.parts + part] = mine;
}

}  // namespace radix::gpu
