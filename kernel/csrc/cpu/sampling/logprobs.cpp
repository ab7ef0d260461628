// Log-softmax of chosen ids and of the largest, without writing the log-softmax of the row.
#include <cmath>

#include "api/sampling.h"
#include "common/tensor.h"
#include "cpu/sampling/sampling.h"
#include "cpu/thread_pool.h"

namespace radix {

void cpu::row_logprobs(const float* x, int64_t n, int32_t id, int64_t top_n, float* logprob, float* top_logprobs,
                       int32_t* top_ids) {
  static thread_local std::vector<int32_t> best;
  const float top = row_max(x, nullptr, n);
  const double log_sum = std::log(row_sum_exp(x, top, n));
  const auto value = [&](int32_t at) {
    return static_cast<float>(static_cast<double>(x[at]) - static_cast<double>(top) - log_sum);
  };
  *logprob = id < 0 ? NAN : value(id);
  row_first_ids(x, n, top_n, best);
  for (int64_t i = 0; i < top_n; i++) {
    top_ids[i] = best[i];
    top_logprobs[i] = value(best[i]);
  }
}

namespace backend {

using namespace cpu;

void token_logprobs(const rk_token_logprobs_args& args, rk_stream) {
  const rk_tensor& logits = *args.logits;
  const int64_t n = logits.shape[1], top_n = args.top_ids->shape[1];
  const int32_t* ids = data_ptr<int32_t>(*args.ids);
  for (int64_t b = 0; b < logits.shape[0]; b++)
    if (ids[b] < -1 || ids[b] >= n)
      fail(RK_INVALID, "token_logprobs: ids[%lld] is %d, expected -1 to %lld", (long long)b, ids[b], (long long)n - 1);
  parallel_for(logits.shape[0], 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++)
      row_logprobs(data_ptr<float>(logits) + b * logits.strides[0], n, ids[b], top_n,
                   data_ptr<float>(*args.logprob) + b, data_ptr<float>(*args.top_logprobs) + b * top_n,
                   data_ptr<int32_t>(*args.top_ids) + b * top_n);
  });
}

}  // namespace backend
}  // namespace radix
