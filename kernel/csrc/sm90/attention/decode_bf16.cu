// Paged decode of bf16 queries over a bf16 cache.
#include "sm90/attention/decode_kernel.cuh"

namespace radix::attention::decode {

void launch_bf16(const Args& args, rk_stream stream) {
  launch_type<bf16, bf16>(args, stream);
}

}  // namespace radix::attention::decode
