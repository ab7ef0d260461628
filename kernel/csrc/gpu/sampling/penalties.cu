// Penalties as an op of their own, in place, and the counts that they are made of. A draw applies the same penalties on
// its way (logits.h).
#include "api/sampling.h"
#include "gpu/device/launch.h"
#include "gpu/sampling/logits.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    penalties_kernel(Matrix logits, Matrix counts, const int32_t* slots, const float* repetition,
                     const float* frequency, const float* presence) {
  for (int64_t b = blockIdx.y; b < logits.rows; b += gridDim.y) {
    const int64_t slot = slots[b];
    if (slot < 0 || slot >= counts.rows) continue;
    float* x = logits.row<float>(b);
    const int32_t* words = counts.row<const int32_t>(slot);
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < logits.columns;
         i += int64_t{gridDim.x} * kThreads)
      if (words[i] != 0) x[i] = penalised(x[i], words[i], repetition[b], frequency[b], presence[b]);
  }
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(Matrix counts, const int32_t* slots, const int32_t* ids, int64_t rows) {
  const int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (b >= rows || slots[b] < 0 || slots[b] >= counts.rows || ids[b] < 0 || ids[b] >= counts.columns) return;
  atomicAdd(counts.row<int32_t>(slots[b]) + ids[b], 1);
}

}  // namespace

namespace backend {

void apply_penalties(const rk_apply_penalties_args& args, rk_stream stream) {
  const Matrix logits(*args.logits), counts(*args.counts);
  constexpr int64_t kMostRows = 65535;  // a grid has no more in y
  const dim3 grid(blocks_for(logits.columns, kThreads * 8, 256), blocks_for(logits.rows, 1, kMostRows));
  launch("apply_penalties_inplace", args.logits->device, stream, penalties_kernel, grid, kThreads, logits, counts,
         static_cast<const int32_t*>(data_ptr<int32_t>(*args.slots)),
         static_cast<const float*>(data_ptr<float>(*args.repetition)),
         static_cast<const float*>(data_ptr<float>(*args.frequency)),
         static_cast<const float*>(data_ptr<float>(*args.presence)));
}

void count_tokens(const rk_count_tokens_args& args, rk_stream stream) {
  const int64_t rows = args.ids->shape[0];
  launch("count_tokens_inplace", args.counts->device, stream, count_kernel, blocks_for(rows, kThreads), kThreads,
         Matrix(*args.counts), static_cast<const int32_t*>(data_ptr<int32_t>(*args.slots)),
         static_cast<const int32_t*>(data_ptr<int32_t>(*args.ids)), rows);
}

}  // namespace backend
}  // namespace radix
