// Lists of the persistent kernel's tiles, made by a launch ahead of it.
#include "sm90/common/pdl.cuh"
#include "sm90/experts/grouped_persistent.cuh"
#include "sm90/experts/grouped_swap_ab_tile.cuh"

namespace radix::experts {
namespace {

using gemm::kPersistentTokens;
using gemm::TileRows;

constexpr int kThreads = 256;

// A tile is of the group of its first row. By a warp each.
__global__ void __launch_bounds__(kThreads)
    contiguous_kernel(const int32_t* indices, int64_t rows, int groups, TileList to) {
  constexpr int kRuns = kPersistentTokens / 32;
  sm90::pdl_wait();
  sm90::pdl_trigger();
  const int lane = threadIdx.x % 32, all = static_cast<int>((rows + kPersistentTokens - 1) / kPersistentTokens);
  if (blockIdx.x == 0 && threadIdx.x == 0) *to.count() = all;
  for (int tile = (blockIdx.x * kThreads + threadIdx.x) / 32; tile < all; tile += gridDim.x * (kThreads / 32)) {
    const int64_t first = int64_t{tile} * kPersistentTokens;
    int of[kRuns], there = 0;
#pragma unroll
    for (int i = 0; i < kRuns; i++) {
      const int64_t row = first + i * 32 + lane;
      of[i] = row < rows ? indices[row] : -1;
    }
    const int group = __shfl_sync(~0u, of[0], 0);
#pragma unroll
    for (int i = 0; i < kRuns; i++) there += __popc(__ballot_sync(~0u, of[i] == group));
    if (group < 0 || group >= groups) there = 0;
    const int row = static_cast<int>(first);
    if (lane == 0) to.tiles()[tile] = {row, row + there, there ? group : 0, 0};
  }
}

// By one block: the tiles of groups (or named experts) whose rows p names.
__device__ void list_groups(const GroupedSwapAbParams& p, Schedule& schedule, TileList to) {
  if (threadIdx.x < 32) schedule.find(p, kPersistentTokens);
  __syncthreads();
  const int all = schedule.first[p.named];
  if (threadIdx.x == 0) *to.count() = all;
  for (int tile = threadIdx.x; tile < all; tile += kThreads) {
    int low = 0, high = p.named;  // first[low] <= tile < first[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (schedule.first[middle] <= tile ? low : high) = middle;
    }
    const int row = schedule.begins[low] + (tile - schedule.first[low]) * kPersistentTokens;
    to.tiles()[tile] = {row, min(row + kPersistentTokens, schedule.ends[low]), p.map ? p.map[low] : low, 0};
  }
}

// Block 0 lists, others find the places.
__global__ void __launch_bounds__(kThreads)
    list_kernel(GroupedSwapAbParams p, const int32_t* sorted, int32_t* places, TileList to) {
  __shared__ Schedule schedule;
  sm90::pdl_wait();
  sm90::pdl_trigger();
  if (blockIdx.x == 0) return list_groups(p, schedule, to);
  const int count = p.ends[p.named - 1];
  for (int i = (blockIdx.x - 1) * kThreads + threadIdx.x; i < count; i += (gridDim.x - 1) * kThreads)
    places[sorted[i]] = i;
}

sm90::LaunchShape shape_of(const Problem& q, int64_t items, int more) {
  sm90::LaunchShape shape;
  shape.grid = dim3(gpu::blocks_for(items, kThreads, 4 * multiprocessors(q.device)) + more);
  shape.threads = kThreads;
  return shape;
}

}  // namespace

void list_contiguous(const Problem& q, const int32_t* indices, int64_t rows, int groups, TileList to) {
  const int64_t tiles = (rows + kPersistentTokens - 1) / kPersistentTokens;
  sm90::launch_dependent(q.op, q.device, q.stream, contiguous_kernel, shape_of(q, tiles * 32, 0), indices, rows, groups,
                         to);
}

void list_masked(const Problem& q, const int32_t* counts, int room, int groups, TileList to) {
  GroupedSwapAbParams p = {};
  p.ends = counts;
  p.room = room;
  p.named = groups;
  sm90::launch_dependent(q.op, q.device, q.stream, list_kernel, shape_of(q, 0, 1), p,
                         static_cast<const int32_t*>(nullptr), static_cast<int32_t*>(nullptr), to);
}

void list_pairs(const Problem& q, const Scratch& s) {
  GroupedSwapAbParams p = {};
  p.begins = s.offsets;
  p.ends = s.offsets + 1;
  p.map = q.routing.map;
  p.named = q.routing.named;
  sm90::launch_dependent(q.op, q.device, q.stream, list_kernel, shape_of(q, q.pairs(), 1), p,
                         static_cast<const int32_t*>(s.sorted), s.places, TileList{s.tiles});
}

}  // namespace radix::experts
