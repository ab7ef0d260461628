#include "sm90/mla/decode_wgmma_h64.cuh"

namespace radix::mla {

void launch_wgmma_h64_f16(const WgmmaArgs& args, rk_stream stream) {
  wgmma_h64::launch<f16>(args, stream);
}

}  // namespace radix::mla
