// Sorting of (token, place) pairs by expert.
#pragma once

#include "gpu/device/launch.h"
#include "gpu/device/reduce.h"

namespace radix::gpu {

constexpr int kAlignThreads = 1024;

// The lanes of the warp where `yes` holds, lane 0 in bit 0.
__device__ inline uint64_t ballot(bool yes) {
#if defined(__HIP__)
  return __ballot(yes);
#else
  return __ballot_sync(0xffffffffu, yes);
#endif
}

struct AlignTask {
  const int32_t *ids, *map;  // map may be NULL
  int n, experts, block;
  int32_t *sorted, *block_experts, *total;  // the last two may be NULL
  int32_t* offsets;                         // [experts + 1], where each one's entries begin; may be NULL
  int locals;                               // local numbers are below it

  __device__ bool here(int local) const { return local >= 0 && local < locals; }
};

// A block an expert: it counts all entries (integers: in any order), so it knows where its own begin, and writes them
// in their order, a run of entries a warp. No workspace, one launch.
__device__ inline void align(const AlignTask& task) {
  constexpr int kMaxExperts = 1024, kWarps = kAlignThreads / RK_WARP, kAhead = 4;
  __shared__ int counts[kMaxExperts], matches[kWarps];
  const int expert = blockIdx.x, warp = threadIdx.x / RK_WARP, lane = threadIdx.x % RK_WARP;
  // Where nothing is padded or left out, comparing with this expert tells what lies before it.
  const bool counted = task.block > 1 || task.map;
  if (counted)
    for (int e = threadIdx.x; e < task.experts; e += kAlignThreads) counts[e] = 0;
  __syncthreads();
  wait_for_previous();
  // Entries of this warp, a step for each lane; kAhead loads at a time, since each waits for the L2.
  const int steps = (task.n + kAlignThreads - 1) / kAlignThreads, begin = warp * steps * RK_WARP + lane;
  const int end = min(task.n, (warp + 1) * steps * RK_WARP);
  const auto entry = [&](int step) { return begin + step * RK_WARP; };
  uint32_t mine = 0;  // steps whose entry is this expert's, of the first 32
  int found = 0, before = 0, all = 0;
  for (int first = 0; first < steps; first += kAhead) {
    int id[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; a++) id[a] = entry(first + a) < end ? task.ids[entry(first + a)] : -1;
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      const bool inside = id[a] >= 0 && id[a] < task.experts, match = id[a] == expert;
      if (counted) {
        if (inside) atomicAdd(&counts[id[a]], 1);
      } else {
        before += inside && id[a] < expert;
        all += inside;
      }
      found += __popcll(ballot(match));
      if (first + a < 32) mine |= uint32_t{match} << (first + a);
    }
  }
  if (lane == 0) matches[warp] = found;
  __syncthreads();
  const auto padded = [&](int count) { return (count + task.block - 1) / task.block * task.block; };
  if (counted) {
    for (int e = threadIdx.x; e < task.experts; e += kAlignThreads) {
      if (task.map && !task.here(task.map[e])) continue;
      const int size = padded(counts[e]);
      if (e < expert) before += size;
      all += size;
    }
  }
  before = block_reduce<kAlignThreads>(before, Sum());
  all = block_reduce<kAlignThreads>(all, Sum());
  if (threadIdx.x == 0) {
    if (expert == 0 && task.total) *task.total = all;
    if (task.offsets) task.offsets[expert] = before;
    if (expert == 0 && task.offsets) task.offsets[task.experts] = all;
  }
  const int local = task.map ? task.map[expert] : expert;
  if (!task.here(local)) return;
  int at = before, count = 0;
  for (int w = 0; w < kWarps; w++) {
    if (w == warp) at += count;
    count += matches[w];
  }
  if (task.block_experts)
    for (int b = threadIdx.x; b < padded(count) / task.block; b += kAlignThreads)
      task.block_experts[before / task.block + b] = local;
  for (int i = count + threadIdx.x; i < padded(count); i += kAlignThreads) task.sorted[before + i] = task.n;
  if (matches[warp] == 0) return;
  for (int step = 0; step < steps; step++) {
    const bool match = step < 32 ? mine >> step & 1 : entry(step) < end && task.ids[entry(step)] == expert;
    const uint64_t voters = ballot(match);
    if (match) task.sorted[at + __popcll(voters & ((uint64_t{1} << lane) - 1))] = entry(step);
    at += __popcll(voters);
  }
}

}  // namespace radix::gpu
