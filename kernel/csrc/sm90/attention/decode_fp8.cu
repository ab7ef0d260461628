// Paged decode over an e4m3 cache.
#include "sm90/attention/decode_kernel.cuh"

namespace radix::attention::decode {

void launch_fp8(const Args& args, rk_stream stream) {
  if (args.p.dtype == DType::bf16) {
    launch_type<bf16, e4m3>(args, stream);
  } else {
    launch_type<f16, e4m3>(args, stream);
  }
}

}  // namespace radix::attention::decode
