// Prefill on Hopper.
#include "common/error.h"
#include "cuda/attention/attention.h"

namespace radix::attention {

int64_t prefill_workspace_size(const Shape&) {
  return 0;
}

void run_prefill(const Params&, rk_stream) {
  fail(RK_UNSUPPORTED, "flash_attn: no prefill kernel");
}

}  // namespace radix::attention
