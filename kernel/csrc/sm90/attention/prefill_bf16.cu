// Prefill kernels over bf16.
#include "cuda/attention/prefill_launch.h"

namespace radix::attention::prefill {

void launch_bf16(const Args& args, rk_stream stream) {
  launch<bf16>(args, stream);
}

}  // namespace radix::attention::prefill
