#include "sm90/mla/decode_swap_qk_h16.cuh"

namespace radix::mla {

void launch_swap_qk_h16_f16(const WgmmaArgs& args, rk_stream stream) {
  swap_qk_h16::launch<f16>(args, stream);
}

}  // namespace radix::mla
