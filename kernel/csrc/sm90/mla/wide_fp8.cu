#include "sm90/mla/wide.cuh"

namespace radix::mla {

void launch_wide_fp8(const WideArgs& args, rk_stream stream) {
  wide::launch<bf16, true>(args, stream);
}

}  // namespace radix::mla
