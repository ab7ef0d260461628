// Prefill kernels over f16.
#include "sm90/attention/prefill_launch.cuh"

namespace radix::attention::prefill {

void launch_f16(const Args& args, rk_stream stream) {
  launch<f16>(args, stream);
}

}  // namespace radix::attention::prefill
