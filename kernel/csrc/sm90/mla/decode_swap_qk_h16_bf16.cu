#include "sm90/mla/decode_swap_qk_h16.cuh"

namespace radix::mla {

int64_t swap_qk_h16_workspace_size() {
  return kWorkspaceBytes<swap_qk_h16::kRows>;
}

void launch_swap_qk_h16_bf16(const WgmmaArgs& args, rk_stream stream) {
  swap_qk_h16::launch<bf16>(args, stream);
}

}  // namespace radix::mla
