// Paged decode of bf16 queries over a bf16 cache.
#include "cuda/attention/decode_kernel.h"

namespace radix::attention::decode {

void launch_bf16(const Args& args, rk_stream stream) {
  launch_type<bf16, bf16>(args, stream);
}

}  // namespace radix::attention::decode
