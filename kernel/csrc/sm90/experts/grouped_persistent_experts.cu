// fused_experts for many pairs in FP8: as two grouped products on the persistent kernel.
//
//   x --gather, quantise--> rows --up, silu * mul--> act (bf16) --quantise in place--> act (FP8) --down--> part --> out
//
// `act` keeps its stride: a row's codes take the first half of what its 16-bit values took.
#include "gpu/device/element.h"
#include "sm90/common/pdl.cuh"
#include "sm90/experts/fp8_weights.cuh"
#include "sm90/experts/grouped_persistent.cuh"
#include "sm90/experts/order.cuh"

namespace radix::experts {
namespace {

constexpr int kThreads = 256;

// A warp takes a row, 256 columns at a time. The codes of a round lie where earlier rounds, or (the first) this one,
// were read.
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(char* act, const int32_t* count, int inter, float* scales, int scale_step) {
  sm90::pdl_wait();
  sm90::pdl_trigger();
  const int lane = threadIdx.x % 32, rows = *count;
  for (int row = (blockIdx.x * kThreads + threadIdx.x) / 32; row < rows; row += gridDim.x * (kThreads / 32)) {
    char* at = act + int64_t{row} * inter * 2;
    const auto load = [&](int column) {
      return gpu::load_pack<8>(reinterpret_cast<const bf16*>(at) + min(column, inter - 8));
    };
    auto next = load(lane * 8);
    for (int first = 0; first < inter; first += 256) {
      const int column = first + lane * 8;
      const auto pack = next;
      if (first + 256 < inter) next = load(column + 256);
      const QuantizedEight eight(pack);
      __syncwarp();
      if (column >= inter) continue;
      *reinterpret_cast<uint2*>(at + column) = eight.codes;
      if (lane % 16 == 0) scales[int64_t{column / 128} * scale_step + row] = eight.scale;
    }
  }
}

}  // namespace

void grouped_persistent_experts(const Problem& q, const Scratch& s) {
  gather_rows(q, s);
  list_pairs(q, s);
  PersistentProduct p = {};
  p.op = q.op;
  p.device = q.device;
  p.stream = q.stream;
  p.x = s.rows;
  p.weight = q.w1;
  p.x_step = q.hidden;
  p.rows = q.pairs();
  p.groups = q.experts;
  p.n = 2 * q.inter;
  p.k = q.hidden;
  p.gated = true;
  p.expected = q.pairs() / gemm::kPersistentTokens + q.experts / 2;
  p.tiles = TileList{s.tiles}.groups();
  p.x_scale = s.row_scales;
  p.w_scale = q.w1_scale;
  p.x_scale_step = 1;
  p.x_scale_unit = s.scale_step;
  p.out = s.act;
  p.out_step = q.inter;
  grouped_persistent_fp8(p);

  sm90::LaunchShape shape;
  shape.grid = dim3(gpu::blocks_for(int64_t{q.pairs()} * 32, kThreads, 8 * multiprocessors(q.device)));
  shape.threads = kThreads;
  sm90::launch_dependent(q.op, q.device, q.stream, quantize_kernel, shape, s.act,
                         static_cast<const int32_t*>(s.offsets + q.routing.named), q.inter, s.act_scales, s.scale_step);

  p.x = s.act;
  p.weight = q.w2;
  p.x_step = int64_t{q.inter} * 2;
  p.n = q.hidden;
  p.k = q.inter;
  p.gated = false;
  p.x_scale = s.act_scales;
  p.w_scale = q.w2_scale;
  p.out = s.rows;
  p.out_step = q.hidden;
  grouped_persistent_fp8(p);
  combine(q, s.rows, s.places);
}

}  // namespace radix::experts
