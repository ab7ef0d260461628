#include "sm90/mla/slim.cuh"

namespace radix::mla {

int64_t slim_workspace_size() {
  return kWorkspaceBytes<slim::kRows>;
}

void launch_slim_bf16(const WideArgs& args, rk_stream stream) {
  slim::launch<bf16>(args, stream);
}

}  // namespace radix::mla
