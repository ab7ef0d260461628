// What the kernels on wgmma leave in the workspace, and the kernel that joins it.
#pragma once

#include "cuda/attention/decode_state.h"
#include "cuda/hopper/pdl.h"
#include "cuda/mla/run.h"

namespace radix::mla {

using attention::decode::pack2;
using attention::decode::weight;

constexpr int kMaxRuns = attention::decode::kMaxBlocks;

// What a run tells of the query block that it began and did not finish: its runs to come have a part each.
struct alignas(16) Begun {
  int q_begin, packed, rows;  // as in Segment; query rows in use
  int parts;                  // 0: there is none
};
constexpr int64_t kBegunBytes = (kMaxRuns * int64_t{sizeof(Begun)} + 1023) / 1024 * 1024;

// A part in the workspace, behind the records: O relative to 2^m, and for each row (m, l).
template <int kRows>
constexpr int64_t kPartBytes = kRows * (kLatent * 4 + 8);
template <int kRows>
constexpr int64_t kWorkspaceBytes = kBegunBytes + 2 * kMaxRuns * kPartBytes<kRows>;

__device__ inline float* part_row(char* part, int row) {
  return reinterpret_cast<float*>(part) + row * kLatent;
}
template <int kRows>
__device__ inline float2& part_sums(char* part, int row) {
  return reinterpret_cast<float2*>(part + kRows * kLatent * 4)[row];
}
// The part that block `block` of the grid leaves of a query block that it began, or else entered.
template <int kRows>
__device__ inline char* part_of(const WideArgs& a, int block, bool began) {
  return a.nodes + kBegunBytes + (int64_t{block} * 2 + began) * kPartBytes<kRows>;
}
__device__ inline Begun& begun_of(const WideArgs& a, int run) {
  return reinterpret_cast<Begun*>(a.nodes)[run];
}

__device__ inline Begun begin(const WideArgs& a, const Segment& s, const Place& place, int run, int block_rows) {
  const int rows = min(block_rows, s.queries * a.group - s.packed);
  return {s.q_begin, s.packed, rows, place.run_of(s.from + s.count - 1) - run + 1};
}

// Natural log of the sum of exponentials; -inf where nothing was seen.
__device__ inline float natural_log(float m, float l) {
  return l == 0 ? -INFINITY : (m + log2f(l)) * 0.6931471805599453f;
}

// Parts `skip`, skip + step, ... of row r of the query block that `run` began, summed in order; 4 dimensions a thread.
template <int kRows>
__device__ inline attention::decode::Piece sum_parts(const WideArgs& a, const Begun& b, int run, int r, int skip,
                                                     int step) {
  using attention::decode::Piece;
  constexpr int kAhead = 8;
  const int dim = threadIdx.x % 128 * 4;
  Piece sum = {make_float4(0.f, 0.f, 0.f, 0.f), -INFINITY, 0.f};
  for (int first = skip; first < b.parts; first += kAhead * step) {
    Piece ahead[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; n++) {
      const int at = first + n * step;
      ahead[n] = {make_float4(0.f, 0.f, 0.f, 0.f), -INFINITY, 0.f};
      if (at >= b.parts) continue;
      char* part = part_of<kRows>(a, (run + at) * a.cluster + r / kRows, at == 0);
      ahead[n].o = *reinterpret_cast<const float4*>(part_row(part, r % kRows) + dim);
      const float2 ml = part_sums<kRows>(part, r % kRows);
      ahead[n].m = ml.x, ahead[n].l = ml.y;
    }
#pragma unroll
    for (int n = 0; n < kAhead; n++)
      if (first + n * step < b.parts) sum = attention::decode::join(sum, ahead[n]);
  }
  return sum;
}

// Joins the parts of query blocks that several runs worked on. The blocks take turns at units: a row for each group of
// 128 threads, or, where there are many parts, one row for all groups.
constexpr int kCombineGroups = 4, kCombineThreads = 128 * kCombineGroups, kManyParts = 8;

template <class T, int kRows>
__global__ void __launch_bounds__(kCombineThreads) mla_combine_kernel(const __grid_constant__ WideArgs a, int runs) {
  using attention::decode::Piece;
  __shared__ Begun begun[kMaxRuns];
  __shared__ int last[kMaxRuns];  // of a run's units, plus 1, counted from the first run on
  __shared__ Piece slices[kCombineGroups][128];
  hopper::pdl_wait();
  hopper::pdl_trigger();
  if (threadIdx.x < runs) {
    const Begun b = begun_of(a, threadIdx.x);
    begun[threadIdx.x] = b;
    const int rows = b.parts > kManyParts ? b.rows : (b.rows + kCombineGroups - 1) / kCombineGroups;
    last[threadIdx.x] = b.parts > 0 ? rows : 0;
  }
  __syncthreads();
  for (int step = 1; step < runs; step *= 2) {
    const int i = threadIdx.x, before = i >= step && i < runs ? last[i - step] : 0;
    __syncthreads();
    if (i < runs) last[i] += before;
    __syncthreads();
  }
  const int group = threadIdx.x / 128, lane = threadIdx.x % 128;
  int run = 0;
  for (int unit = blockIdx.x; unit < last[runs - 1]; unit += gridDim.x) {
    while (unit >= last[run]) run++;
    const Begun& b = begun[run];
    const bool many = b.parts > kManyParts;
    const int within = unit - (run > 0 ? last[run - 1] : 0), r = many ? within : within * kCombineGroups + group;
    Piece sum{};
    if (r < b.rows) sum = sum_parts<kRows>(a, b, run, r, many ? group : 0, many ? kCombineGroups : 1);
    if (many) {
      slices[group][lane] = sum;
      __syncthreads();
      for (int g = 1; g < kCombineGroups; g++) sum = attention::decode::join(sum, slices[g][lane]);
      __syncthreads();
    }
    if (r >= b.rows || (many && group > 0)) continue;
    const attention::Params& p = a.p;
    const int64_t token = b.q_begin + (b.packed + r) / a.group, head = (b.packed + r) % a.group;
    const float by = sum.l == 0 ? 0.f : 1.f / sum.l;
    T* out = static_cast<T*>(p.out) + token * p.out_token + head * p.out_head + lane * 4;
    *reinterpret_cast<uint2*>(out) = {pack2<T>(sum.o.x * by, sum.o.y * by), pack2<T>(sum.o.z * by, sum.o.w * by)};
    if (p.lse && lane == 0) p.lse[token * p.lse_token + head * p.lse_head] = natural_log(sum.m, sum.l);
  }
}

template <class T, int kRows>
void launch_combine(const WideArgs& a, int runs, rk_stream stream) {
  const char* op = "mla_decode";
  // The division of the SM's memory that the other kernel has: to change it, an SM must first run empty.
  gpu::check_gpu(cudaFuncSetAttribute(mla_combine_kernel<T, kRows>, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared),
                 op);
  hopper::launch_dependent(op, a.p.device, stream, mla_combine_kernel<T, kRows>, {dim3(2 * kMaxRuns), kCombineThreads},
                           a, runs);
}

}  // namespace radix::mla
