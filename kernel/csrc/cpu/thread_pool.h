// The library's thread pool. No kernel may let its result depend on how many threads ran it.
#pragma once

#include <cstdint>

namespace radix::cpu {

// How many threads an op may use, the caller included.
int num_threads();
void set_num_threads(int n, bool pin);

using RangeFn = void (*)(const void* context, int64_t begin, int64_t end);
void run_ranges(int64_t n, int64_t grain, RangeFn fn, const void* context);

// Calls fn(begin, end) over contiguous parts of [0, n), one part a thread, none smaller than about `grain` (choose it
// so that a part is worth 20 us or more). Returns when all are done; what fn threw on one of the threads is thrown
// then. When the pool is busy with another thread's op, or fn itself calls parallel_for, the whole range runs on the
// calling thread.
template <class Fn>
void parallel_for(int64_t n, int64_t grain, const Fn& fn) {
  run_ranges(
      n, grain, [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Fn*>(context))(begin, end); },
      &fn);
}

}  // namespace radix::cpu
