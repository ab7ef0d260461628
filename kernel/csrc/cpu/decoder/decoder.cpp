// The residual sums of a decoder on the CPU, split over the pool. The entry in api/decoder.cpp calls the entries of
// other families for the rest.
#include "cpu/decoder/decoder.h"

#include "api/decoder.h"
#include "cpu/thread_pool.h"

namespace radix::backend {

void decoder_add(const rk_tensor& to, const rk_tensor& x) {
  constexpr int64_t kGrainElements = 16 * 1024;
  int64_t count = 1;
  for (int i = 0; i < to.ndim; i++) count *= to.shape[i];
  const auto add = cpu::decoder_kernels().add;
  cpu::parallel_for(count, kGrainElements, [&](int64_t begin, int64_t end) noexcept {
    add(dtype_of(to), data_ptr<void>(to), data_ptr<void>(x), begin, end);
  });
}

}  // namespace radix::backend
