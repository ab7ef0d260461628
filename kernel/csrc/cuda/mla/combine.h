// What the kernels on wgmma leave in the workspace, and the kernel that joins it.
#pragma once

#include "cuda/attention/decode_state.h"
#include "cuda/hopper/pdl.h"
#include "cuda/mla/run.h"

namespace radix::mla {

using attention::decode::pack2;
using attention::decode::weight;

constexpr int kMaxRuns = attention::decode::kMaxBlocks;

// What a run tells of the query block that it began and did not finish; tiles 0: there is none.
struct Begun {
  int q_begin, packed, rows;  // as in Segment; query rows in use
  int from, tiles;            // in the line
  int total, runs;            // as in Place
  int unused;
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

__device__ inline Begun begin(const WideArgs& a, const Segment& s, const Place& place, int block_rows) {
  const int rows = min(block_rows, s.queries * a.group - s.packed);
  return {s.q_begin, s.packed, rows, s.from, s.count, place.total, place.runs, 0};
}

// Natural log of the sum of exponentials; -inf where nothing was seen.
__device__ inline float natural_log(float m, float l) {
  return l == 0 ? -INFINITY : (m + log2f(l)) * 0.6931471805599453f;
}

// A slice of a row's parts, every kStep-th from `skip` on, summed in order; 4 dimensions a thread.
template <int kRows>
__device__ inline attention::decode::Piece sum_parts(const WideArgs& a, const Begun& b, int run, int r, int skip,
                                                     int step) {
  using attention::decode::Piece;
  const Place place = {b.total, b.runs, 0, 0};
  const int dim = threadIdx.x % 128 * 4, end = b.from + b.tiles;
  Piece sum = {make_float4(0.f, 0.f, 0.f, 0.f), -INFINITY, 0.f};
  for (int at = run + skip; at < b.runs && (at == run || place.start(at) < end);) {
    constexpr int kAhead = 4;
    Piece ahead[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; n++) {
      ahead[n] = {make_float4(0.f, 0.f, 0.f, 0.f), -INFINITY, 0.f};
      if (at < b.runs && (at == run || place.start(at) < end)) {
        char* part = part_of<kRows>(a, at * a.cluster + r / kRows, at == run);
        ahead[n].o = *reinterpret_cast<const float4*>(part_row(part, r % kRows) + dim);
        const float2 ml = part_sums<kRows>(part, r % kRows);
        ahead[n].m = ml.x, ahead[n].l = ml.y;
      }
      at += step;
    }
#pragma unroll
    for (int n = 0; n < kAhead; n++) sum = attention::decode::join(sum, ahead[n]);
  }
  return sum;
}

// Joins the parts of query blocks that several runs worked on. The blocks take turns at units of 4 rows, or of one row
// where there are many parts, which 4 groups of 128 threads then share.
constexpr int kCombineGroups = 4, kCombineThreads = 128 * kCombineGroups, kManyParts = 8;

template <class T, int kRows>
__global__ void __launch_bounds__(kCombineThreads) mla_combine_kernel(const __grid_constant__ WideArgs a, int runs) {
  using attention::decode::Piece;
  __shared__ Begun begun[kMaxRuns];
  __shared__ Piece slices[kCombineGroups][128];
  hopper::pdl_wait();
  for (int i = threadIdx.x; i < runs; i += kCombineThreads) begun[i] = begun_of(a, i);
  __syncthreads();
  const int group = threadIdx.x / 128;
  int unit = blockIdx.x;
  for (int run = 0; run < runs; run++) {
    const Begun& b = begun[run];
    if (b.tiles == 0) continue;
    const bool many = b.tiles > kManyParts * (b.total / b.runs);
    const int units = many ? b.rows : (b.rows + kCombineGroups - 1) / kCombineGroups;
    for (; unit < units; unit += gridDim.x) {
      const int r = many ? unit : unit * kCombineGroups + group;
      Piece sum{};
      if (r < b.rows) sum = sum_parts<kRows>(a, b, run, r, many ? group : 0, many ? kCombineGroups : 1);
      if (many) {
        slices[group][threadIdx.x % 128] = sum;
        __syncthreads();
        for (int g = 1; g < kCombineGroups; g++) sum = attention::decode::join(sum, slices[g][threadIdx.x % 128]);
        __syncthreads();
      }
      if (r >= b.rows || (many && group > 0)) continue;
      const attention::Params& p = a.p;
      const int dim = threadIdx.x % 128 * 4;
      const int64_t token = b.q_begin + (b.packed + r) / a.group, head = (b.packed + r) % a.group;
      const float by = sum.l == 0 ? 0.f : 1.f / sum.l;
      T* out = static_cast<T*>(p.out) + token * p.out_token + head * p.out_head + dim;
      *reinterpret_cast<uint2*>(out) = {pack2<T>(sum.o.x * by, sum.o.y * by), pack2<T>(sum.o.z * by, sum.o.w * by)};
      if (p.lse && dim == 0) p.lse[token * p.lse_token + head * p.lse_head] = natural_log(sum.m, sum.l);
    }
    unit -= units;
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
