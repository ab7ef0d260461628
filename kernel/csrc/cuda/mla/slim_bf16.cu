#include "cuda/mla/slim.h"

namespace radix::mla {

void launch_slim_bf16(const WideArgs& args, rk_stream stream) {
  slim::launch<bf16>(args, stream);
}

}  // namespace radix::mla
