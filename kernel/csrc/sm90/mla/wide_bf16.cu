#include "sm90/mla/wide.cuh"

namespace radix::mla {

int64_t wide_workspace_size() {
  return kWorkspaceBytes<wide::kRows>;
}

void launch_wide_bf16(const WideArgs& args, rk_stream stream) {
  wide::launch<bf16>(args, stream);
}

}  // namespace radix::mla
