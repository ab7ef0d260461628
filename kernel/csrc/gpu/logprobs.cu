// Log-softmax of chosen ids and of the largest on the GPU, a block a row, without writing the log-softmax of the row.
// Bound by bytes: two passes, and one more (in L2) for each of the top_n.
#include "api/sampling.h"
#include "common/tensor.h"
#include "gpu/launch.h"
#include "gpu/select.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = kSelectThreads;

struct Task {
  const float* logits;
  int64_t stride, columns, top_n;
  const int32_t* ids;
  float *logprob, *top_logprobs;
  int32_t* top_ids;
};

// (key, id) in one word: a larger word comes first in the order of ids.
__device__ inline uint64_t order_word(float x, int64_t id) {
  return uint64_t{order_key(x)} << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(id));
}

__global__ void __launch_bounds__(kThreads) logprobs_kernel(Task task) {
  const int64_t b = blockIdx.x, n = task.columns;
  const float* x = task.logits + b * task.stride;
  float largest = -INFINITY;
  for_each_id(x, n, [&](int64_t, float value) { largest = fmaxf(largest, value); });
  largest = block_reduce<kThreads>(largest, Max());
  double sum = 0;
  for_each_id(x, n, [&](int64_t, float value) { sum += static_cast<double>(expf(value - largest)); });
  const double log_sum = log(block_reduce<kThreads>(sum, Sum()));
  const auto logprob = [&](int64_t id) {
    return static_cast<float>(static_cast<double>(x[id]) - static_cast<double>(largest) - log_sum);
  };
  if (threadIdx.x == 0) {
    const int32_t id = task.ids[b];
    task.logprob[b] = id < 0 || id >= n ? NAN : logprob(id);
  }
  uint64_t last = UINT64_MAX;
  for (int64_t k = 0; k < task.top_n; k++) {
    uint64_t best = 0;
    for_each_id(x, n, [&](int64_t id, float value) {
      const uint64_t word = order_word(value, id);
      if (word < last && word > best) best = word;
    });
    last = block_reduce<kThreads>(best, MaxWord());
    if (threadIdx.x == 0) {
      const auto id = static_cast<int32_t>(~static_cast<uint32_t>(last));
      task.top_ids[b * task.top_n + k] = id;
      task.top_logprobs[b * task.top_n + k] = logprob(id);
    }
  }
}

}  // namespace

namespace backend {

void token_logprobs(const rk_token_logprobs_args& args, rk_stream stream) {
  const rk_tensor& logits = *args.logits;
  const Task task{data_ptr<float>(logits),
                  logits.strides[0],
                  logits.shape[1],
                  args.top_ids->shape[1],
                  data_ptr<int32_t>(*args.ids),
                  data_ptr<float>(*args.logprob),
                  data_ptr<float>(*args.top_logprobs),
                  data_ptr<int32_t>(*args.top_ids)};
  launch("token_logprobs", logits.device, stream, logprobs_kernel, static_cast<unsigned>(logits.shape[0]), kThreads,
         task);
}

}  // namespace backend
}  // namespace radix
