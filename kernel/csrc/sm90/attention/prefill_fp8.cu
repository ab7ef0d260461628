// Prefill kernels over e4m3; out is bf16 or f16.
#include "sm90/attention/prefill_launch.cuh"

namespace radix::attention::prefill {

void launch_fp8(const Args& a, rk_stream stream) {
  launch_alone_or_paired<e4m3, 128, 128, 160, 128, 3>(a, stream);
}

}  // namespace radix::attention::prefill
