// Log-softmax of chosen ids and of the largest, without writing the log-softmax of the row.
#include <cmath>

#include "api/sampling.h"
#include "common/tensor.h"
#include "cpu/sampling/order.h"
#include "cpu/sampling/sampling.h"
#include "cpu/thread_pool.h"

namespace radix::backend {

using namespace cpu;

void token_logprobs(const rk_token_logprobs_args& args, rk_stream) {
  const rk_tensor& logits = *args.logits;
  const int64_t n = logits.shape[1], top_n = args.top_ids->shape[1];
  const int32_t* ids = data_ptr<int32_t>(*args.ids);
  for (int64_t b = 0; b < logits.shape[0]; b++)
    if (ids[b] < -1 || ids[b] >= n)
      fail(RK_INVALID, "token_logprobs: ids[%lld] is %d, expected -1 to %lld", (long long)b, ids[b], (long long)n - 1);
  parallel_for(logits.shape[0], 1, [&](int64_t begin, int64_t end) noexcept {
    static thread_local std::vector<int32_t> best;
    for (int64_t b = begin; b < end; b++) {
      const float* x = data_ptr<float>(logits) + b * logits.strides[0];
      const float top = sampling_kernels().max(x, n);
      const double log_sum = std::log(sampling_kernels().sum_exp(x, top, n));
      const auto logprob = [&](int32_t id) {
        return static_cast<float>(static_cast<double>(x[id]) - static_cast<double>(top) - log_sum);
      };
      data_ptr<float>(*args.logprob)[b] = ids[b] < 0 ? NAN : logprob(ids[b]);
      first_ids(x, n, top_n, best);
      for (int64_t i = 0; i < top_n; i++) {
        data_ptr<int32_t>(*args.top_ids)[b * top_n + i] = best[i];
        data_ptr<float>(*args.top_logprobs)[b * top_n + i] = logprob(best[i]);
      }
    }
  });
}

}  // namespace radix::backend
