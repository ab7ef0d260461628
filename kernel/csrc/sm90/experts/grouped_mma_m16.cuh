// Launches of grouped_mma_m16.
#pragma once

#include <algorithm>

#include "sm90/experts/grouped_mma_m16_kernel.cuh"

namespace radix::experts {

// Two blocks of `up` and one of `down`, which waits for them with its rings full, share a multiprocessor.
constexpr int kUpDepth = 4, kDownDepth = 8;

// launch_dependent() asks for what exceeds 48 KiB of dynamic memory; these declare some of their own beside it.
template <class Kernel>
void launch(const Problem& q, Kernel kernel, const sm90::LaunchShape& shape, const GroupedMmaM16Params& p) {
  const gpu::DeviceScope scope(q.device);
  gpu::raise_kernel_attribute(kOp, q.device, kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
  sm90::launch_dependent(kOp, q.device, q.stream, kernel, shape, p);
}

template <class T, class W, int kHalves>
void launch_grouped_mma_m16(const Problem& q) {
  const int blocks = 2 * multiprocessors(q.device), item = sizeof(W);
  GroupedMmaM16Params p = {};
  p.routing = q.routing;
  p.x = q.x;
  p.x_step = q.x_step;
  p.weight = q.w1;
  p.row_step = int64_t{q.hidden} * item;
  p.expert_step = p.row_step * 2 * q.inter;
  p.n = q.inter;
  p.k_bytes = q.hidden * item;
  p.scales = scales_of(q, q.w1_scale, 2 * q.inter, q.hidden);
  p.out = q.workspace;
  p.out_step = q.inter;
  sm90::LaunchShape shape;
  shape.grid = dim3(std::min(blocks, std::min(q.pairs(), q.experts) * ((q.inter + 7) / 8)));
  shape.threads = kMmaM16Threads;
  shape.shared_bytes = UnitRing<2, kUpDepth>::kBytes;
  launch(q, grouped_mma_m16_up_kernel<T, W, kHalves, kUpDepth>, shape, p);

  p.x = q.workspace;
  p.x_step = int64_t{q.inter} * 2;
  p.weight = q.w2;
  p.row_step = int64_t{q.inter} * item;
  p.expert_step = p.row_step * q.hidden;
  p.n = q.hidden;
  p.k_bytes = q.inter * item;
  p.scales = scales_of(q, q.w2_scale, q.hidden, q.inter);
  p.out = q.out;
  p.out_step = q.out_step;
  shape.grid = dim3(std::min(blocks, (q.hidden + 7) / 8));
  shape.shared_bytes = UnitRing<1, kDownDepth>::kBytes;
  launch(q, grouped_mma_m16_down_kernel<T, W, kHalves, kDownDepth>, shape, p);
}

template <class T, class W>
void grouped_mma_m16(const Problem& q) {
  q.routing.tokens <= 8 ? launch_grouped_mma_m16<T, W, 1>(q) : launch_grouped_mma_m16<T, W, 2>(q);
}

}  // namespace radix::experts
