#include "sm90/experts/order.cuh"

#include <climits>

#include "gpu/device/element.h"
#include "gpu/device/launch.h"
#include "gpu/moe/align.h"
#include "sm90/common/pdl.cuh"
#include "sm90/experts/fp8_weights.cuh"

namespace radix::experts {
namespace {

constexpr int kThreads = 256;
constexpr int kPlacedPairs = 4096;  // up to so many are placed without a sort

__global__ void __launch_bounds__(gpu::kAlignThreads) sort_kernel(gpu::AlignTask task) {
  gpu::align(task);
}

// Rows of x by place; a lane moves a piece of 8 elements of a row, neighbouring lanes neighbouring pieces. `inside`: it
// is one; all lanes of a warp call.
template <bool kPermuted>
struct CopyRows {
  const char* x;
  int64_t x_step;  // bytes
  int pieces;
  uint4* rows;

  __device__ void move(bool inside, int64_t token, int64_t place, int piece) const {
    const uint4* from = reinterpret_cast<const uint4*>(x + token * x_step);
    if (inside)
      rows[place * pieces + piece] = kPermuted ? permuted_piece(from[piece & ~1], from[piece | 1], piece) : from[piece];
  }
};

// In FP8: the 16 lanes of 128 columns find their scale.
template <class T>
struct QuantizeRows {
  const char* x;
  int64_t x_step;
  int pieces;
  uint2* rows;
  float* scales;
  int scale_step;

  __device__ void move(bool inside, int64_t token, int64_t place, int piece) const {
    const QuantizedEight eight(gpu::load_pack<8>(reinterpret_cast<const T*>(x + token * x_step) + piece * 8));
    if (!inside) return;
    rows[place * pieces + piece] = eight.codes;
    if (piece % 16 == 0) scales[int64_t{piece / 16} * scale_step + place] = eight.scale;
  }
};

// After the sort.
template <class Rows>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(Rows rows, const int32_t* sorted, const int32_t* count, int topk) {
  sm90::pdl_wait();
  sm90::pdl_trigger();
  const int64_t total = int64_t{*count} * rows.pieces, step = int64_t{gridDim.x} * kThreads;
  const int lane = threadIdx.x % 32;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i - lane < total; i += step) {
    const int64_t item = min(i, total - 1), place = item / rows.pieces;
    rows.move(i < total, sorted[place] / topk, place, static_cast<int>(item % rows.pieces));
  }
}

// Without a sort: a warp finds the place of a pair among all others, which the block holds, and moves its row; or it
// finds where an expert's pairs begin.
template <class Rows>
__global__ void __launch_bounds__(kThreads)
    place_kernel(Rows rows, Routing r, int pairs, int32_t* sorted, int32_t* offsets) {
  __shared__ int ids[kPlacedPairs];
  constexpr int kNobody = INT_MAX;
  sm90::pdl_wait();
  sm90::pdl_trigger();
  for (int i = threadIdx.x; i < pairs; i += kThreads) {
    const int id = r.ids[i];
    ids[i] = r.local(id) < 0 ? kNobody : id;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int job = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; job < pairs + r.named + 1;
       job += gridDim.x * (kThreads / 32)) {
    const bool of_pair = job < pairs;
    const int id = of_pair ? ids[job] : job - pairs;
    if (id == kNobody) continue;
    int before = 0;
    for (int i = lane; i < pairs; i += 32) before += ids[i] < id || (ids[i] == id && i < job && of_pair);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) before += __shfl_xor_sync(~0u, before, mask);
    if (lane == 0) (of_pair ? sorted[before] : offsets[id]) = of_pair ? job : before;
    if (!of_pair) continue;
    for (int i = lane; i - lane < rows.pieces; i += 32)
      rows.move(i < rows.pieces, job / r.topk, before, min(i, rows.pieces - 1));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(Routing r, const char* part, const int32_t* places, int pieces, char* out, int64_t out_step) {
  using gpu::Pack;
  sm90::pdl_wait();
  sm90::pdl_trigger();
  const int64_t total = int64_t{r.tokens} * pieces;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    const int64_t token = i / pieces, piece = i % pieces;
    float sum[8] = {};
#pragma unroll 4
    for (int k = 0; k < r.topk; k++) {
      const int64_t pair = token * r.topk + k;
      if (r.local(r.ids[pair]) < 0) continue;
      const int64_t row = places ? places[pair] : pair;
      const auto v = gpu::load_pack<8>(reinterpret_cast<const T*>(part) + (row * pieces + piece) * 8);
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

sm90::LaunchShape shape_of(const Problem& q, int64_t items) {
  sm90::LaunchShape shape;
  shape.grid = dim3(gpu::blocks_for(items, kThreads, 16 * multiprocessors(q.device)));
  shape.threads = kThreads;
  return shape;
}

void sort_pairs(const Problem& q, const Scratch& s) {
  const gpu::AlignTask task{q.routing.ids, q.routing.map, q.pairs(), q.routing.named, 1,
                            s.sorted,      nullptr,       nullptr,   s.offsets,       q.experts};
  sm90::LaunchShape shape;
  shape.grid = dim3(q.routing.named);
  shape.threads = gpu::kAlignThreads;
  sm90::launch_dependent(kOp, q.device, q.stream, sort_kernel, shape, task);
}

template <class Rows>
void order(const Problem& q, const Scratch& s, const Rows& rows) {
  if (q.pairs() <= kPlacedPairs) {
    const auto shape = shape_of(q, int64_t{q.pairs() + q.routing.named + 1} * 32);
    return sm90::launch_dependent(kOp, q.device, q.stream, place_kernel<Rows>, shape, rows, q.routing, q.pairs(),
                                  s.sorted, s.offsets);
  }
  sort_pairs(q, s);
  sm90::launch_dependent(kOp, q.device, q.stream, gather_kernel<Rows>, shape_of(q, int64_t{q.pairs()} * rows.pieces),
                         rows, s.sorted, s.offsets + q.routing.named, q.routing.topk);
}

}  // namespace

bool gather_rows(const Problem& q, const Scratch& s) {
  const int pieces = q.hidden / 8;
  if (q.fp8_activations) {
    const auto run = [&](auto type) {
      using T = decltype(type);
      order(q, s, QuantizeRows<T>{q.x, q.x_step, pieces, reinterpret_cast<uint2*>(s.rows), s.row_scales, s.scale_step});
    };
    q.type == DType::bf16 ? run(bf16{}) : run(f16{});
  } else if (q.w1_scale) {
    order(q, s, CopyRows<true>{q.x, q.x_step, pieces, reinterpret_cast<uint4*>(s.rows)});
  } else {
    order(q, s, CopyRows<false>{q.x, q.x_step, pieces, reinterpret_cast<uint4*>(s.rows)});
  }
  return q.pairs() > kPlacedPairs;
}

void combine(const Problem& q, const char* part, const int32_t* places) {
  const int pieces = q.hidden / 8;
  const auto kernel = q.type == DType::bf16 ? combine_kernel<bf16> : combine_kernel<f16>;
  sm90::launch_dependent(kOp, q.device, q.stream, kernel, shape_of(q, int64_t{q.routing.tokens} * pieces), q.routing,
                         part, places, pieces, q.out, q.out_step);
}

}  // namespace radix::experts
