#include "sm90/mla/wide.cuh"

namespace radix::mla {

void launch_wide_f16(const WideArgs& args, rk_stream stream) {
  wide::launch<f16>(args, stream);
}

}  // namespace radix::mla
