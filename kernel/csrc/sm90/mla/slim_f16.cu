#include "sm90/mla/slim.cuh"

namespace radix::mla {

void launch_slim_f16(const WideArgs& args, rk_stream stream) {
  slim::launch<f16>(args, stream);
}

}  // namespace radix::mla
