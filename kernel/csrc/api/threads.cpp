// C entries of the thread pool.
#include "radix_kernels/threads.h"

#include "common/error.h"
#include "cpu/thread_pool.h"

rk_status rk_set_num_threads(int32_t n, int32_t pin) {
  return radix::guard([&] { radix::cpu::set_num_threads(n, pin != 0); });
}

rk_status rk_get_num_threads(int32_t* n) {
  return radix::guard([&] { *n = radix::cpu::num_threads(); });
}
