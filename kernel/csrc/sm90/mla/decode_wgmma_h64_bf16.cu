#include "sm90/mla/decode_wgmma_h64.cuh"

namespace radix::mla {

int64_t wgmma_h64_workspace_size() {
  return kWorkspaceBytes<wgmma_h64::kRows>;
}

void launch_wgmma_h64_bf16(const WgmmaArgs& args, rk_stream stream) {
  wgmma_h64::launch<bf16>(args, stream);
}

}  // namespace radix::mla
