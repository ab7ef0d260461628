#include "sm90/mla/decode_wgmma_h64.cuh"

namespace radix::mla {

void launch_wgmma_h64_fp8(const WgmmaArgs& args, rk_stream stream) {
  wgmma_h64::launch<bf16, true>(args, stream);
}

}  // namespace radix::mla
