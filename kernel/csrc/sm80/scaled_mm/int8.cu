// INT8, compiled for sm_80. Sums are exact: every tile gives the same bits.
#include "sm80/scaled_mm/kernel.cuh"

namespace radix::scaled_mm {

void run_int8(const Problem& q) {
  if (q.m <= 16) return launch<int8_t, MmaTile<16, 64, 128, 16, 16, 4>>(q);
  if (q.m <= 64) return launch<int8_t, MmaTile<64, 64, 128, 32, 32, 3>>(q);
  launch<int8_t, MmaTile<128, 128, 64, 64, 64, 4>>(q);
}

}  // namespace radix::scaled_mm
