#include "cuda/experts/order.h"

#include "cuda/experts/e4m3.h"
#include "cuda/hopper/pdl.h"
#include "gpu/element.h"
#include "gpu/launch.h"
#include "gpu/moe_align.h"

namespace radix::experts {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(gpu::kAlignThreads) sort_kernel(gpu::AlignTask task) {
  gpu::align(task);
}

// Pieces of 16 bytes.
template <bool kPermuted>
__global__ void __launch_bounds__(kThreads) gather_kernel(const char* x, int64_t x_step, const int32_t* sorted,
                                                          const int32_t* count, int topk, int pieces, uint4* rows) {
  hopper::pdl_wait();
  hopper::pdl_trigger();
  const int64_t total = int64_t{*count} * pieces;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    const int64_t token = sorted[i / pieces] / topk;
    const int piece = static_cast<int>(i % pieces);
    const uint4* from = reinterpret_cast<const uint4*>(x + token * x_step);
    rows[i] = kPermuted ? permuted_piece(from[piece & ~1], from[piece | 1], piece) : from[piece];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(Routing r, const char* part, int pieces, char* out, int64_t out_step) {
  using gpu::Pack;
  hopper::pdl_wait();
  hopper::pdl_trigger();
  const int64_t total = int64_t{r.tokens} * pieces;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    const int64_t token = i / pieces, piece = i % pieces;
    float sum[8] = {};
#pragma unroll 4
    for (int k = 0; k < r.topk; k++) {
      const int64_t pair = token * r.topk + k;
      const int id = r.ids[pair];
      if (id < 0 || id >= r.named || (r.map && r.map[id] < 0)) continue;
      const auto v = gpu::load_pack<8>(reinterpret_cast<const T*>(part) + (pair * pieces + piece) * 8);
      const float weight = r.weights[pair];
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] += weight * gpu::to_float(v.at[j]);
    }
    Pack<T, 8> result;
#pragma unroll
    for (int j = 0; j < 8; j++) gpu::from_float(sum[j], result.at[j]);
    gpu::store_pack<8>(reinterpret_cast<T*>(out) + token * out_step + piece * 8, result);
  }
}

hopper::LaunchShape shape_of(const Problem& q, int64_t items) {
  hopper::LaunchShape shape;
  shape.grid = dim3(gpu::blocks_for(items, kThreads, 16 * multiprocessors(q.device)));
  shape.threads = kThreads;
  return shape;
}

}  // namespace

void sort_pairs(const Problem& q, int32_t* sorted, int32_t* offsets) {
  const gpu::AlignTask task{q.routing.ids, q.routing.map, q.pairs(), q.routing.named, 1,
                            sorted,        nullptr,       nullptr,   offsets};
  hopper::LaunchShape shape;
  shape.grid = dim3(q.routing.named);
  shape.threads = gpu::kAlignThreads;
  hopper::launch_dependent(kOp, q.device, q.stream, sort_kernel, shape, task);
}

void gather_rows(const Problem& q, const int32_t* sorted, const int32_t* offsets, char* rows) {
  const int pieces = q.hidden / 8;
  const auto kernel = q.w1_scale ? gather_kernel<true> : gather_kernel<false>;
  hopper::launch_dependent(kOp, q.device, q.stream, kernel, shape_of(q, int64_t{q.pairs()} * pieces), q.x, q.x_step,
                           sorted, offsets + q.routing.named, q.routing.topk, pieces, reinterpret_cast<uint4*>(rows));
}

void combine(const Problem& q, const char* part) {
  const int pieces = q.hidden / 8;
  const auto kernel = q.type == DType::bf16 ? combine_kernel<bf16> : combine_kernel<f16>;
  hopper::launch_dependent(kOp, q.device, q.stream, kernel, shape_of(q, int64_t{q.routing.tokens} * pieces), q.routing,
                           part, pieces, q.out, q.out_step);
}

}  // namespace radix::experts
