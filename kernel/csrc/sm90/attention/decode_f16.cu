// Paged decode of f16 queries over a f16 cache.
#include "sm90/attention/decode_kernel.cuh"

namespace radix::attention::decode {

void launch_f16(const Args& args, rk_stream stream) {
  launch_type<f16, f16>(args, stream);
}

}  // namespace radix::attention::decode
