// Sorting of (token, place) pairs by expert.
#pragma once

#include "gpu/launch.h"
#include "gpu/reduce.h"

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
};

// A block an expert: it counts all entries (integers: in any order), so it knows where its own begin, and writes them
// in their order, a run of entries a warp. No workspace, one launch.
__device__ inline void align(const AlignTask& task) {
  constexpr int kMaxExperts = 1024, kWarps = kAlignThreads / RK_WARP, kAhead = 4;
  __shared__ int counts[kMaxExperts], matches[kWarps];
  const int expert = blockIdx.x, warp = threadIdx.x / RK_WARP, lane = threadIdx.x % RK_WARP;
  for (int e = threadIdx.x; e < task.experts; e += kAlignThreads) counts[e] = 0;
  __syncthreads();
  wait_for_previous();
  // Entries of this warp; kAhead loads at a time, since each waits for the L2.
  const int run = (task.n + kAlignThreads - 1) / kAlignThreads * RK_WARP;
  const int begin = warp * run, end = min(task.n, begin + run);
  int found = 0;
  for (int i = begin + lane; i - lane < end; i += kAhead * RK_WARP) {
    int id[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; a++) id[a] = i + a * RK_WARP < end ? task.ids[i + a * RK_WARP] : -1;
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      if (id[a] >= 0 && id[a] < task.experts) atomicAdd(&counts[id[a]], 1);
      found += __popcll(ballot(id[a] == expert));
    }
  }
  if (lane == 0) matches[warp] = found;
  __syncthreads();
  int before = 0, all = 0;
  for (int e = threadIdx.x; e < task.experts; e += kAlignThreads) {
    if (task.map && task.map[e] < 0) continue;
    const int padded = (counts[e] + task.block - 1) / task.block * task.block;
    if (e < expert) before += padded;
    all += padded;
  }
  before = block_reduce<kAlignThreads>(before, Sum());
  all = block_reduce<kAlignThreads>(all, Sum());
  if (threadIdx.x == 0) {
    if (expert == 0 && task.total) *task.total = all;
    if (task.offsets) task.offsets[expert] = before;
    if (expert == 0 && task.offsets) task.offsets[task.experts] = all;
  }
  const int local = task.map ? task.map[expert] : expert, count = counts[expert];
  if (local < 0 || count == 0) return;
  const int padded = (count + task.block - 1) / task.block * task.block;
  if (task.block_experts)
    for (int b = threadIdx.x; b < padded / task.block; b += kAlignThreads)
      task.block_experts[before / task.block + b] = local;
  for (int i = count + threadIdx.x; i < padded; i += kAlignThreads) task.sorted[before + i] = task.n;
  int at = before;
  for (int w = 0; w < warp; w++) at += matches[w];
  if (matches[warp] == 0) return;
  for (int i = begin + lane; i - lane < end; i += kAhead * RK_WARP) {
    bool match[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; a++) match[a] = i + a * RK_WARP < end && task.ids[i + a * RK_WARP] == expert;
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      const uint64_t voters = ballot(match[a]);
      if (match[a]) task.sorted[at + __popcll(voters & ((uint64_t{1} << lane) - 1))] = i + a * RK_WARP;
      at += __popcll(voters);
    }
  }
}

}  // namespace radix::gpu
