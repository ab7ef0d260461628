// Prefill kernels over bf16.
#include "sm90/attention/prefill_launch.cuh"

namespace radix::attention::prefill {

void launch_bf16(const Args& args, rk_stream stream) {
  launch<bf16>(args, stream);
}

}  // namespace radix::attention::prefill
