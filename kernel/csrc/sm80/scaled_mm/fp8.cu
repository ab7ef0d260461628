// FP8 (e4m3), compiled for sm_89. The slices of k are 128 long in every tile, so that a token's sums are added in one
// order and its bits do not depend on the number of tokens.
#include "sm80/scaled_mm/kernel.cuh"

namespace radix::scaled_mm {

void run_fp8(const Problem& q) {
  if (q.m <= 16) return launch<e4m3, MmaTile<16, 64, 128, 16, 16, 4>>(q);
  if (q.m <= 64) return launch<e4m3, MmaTile<64, 64, 128, 32, 32, 3>>(q);
  launch<e4m3, MmaTile<128, 128, 128, 64, 32, 3>>(q);
}

}  // namespace radix::scaled_mm
