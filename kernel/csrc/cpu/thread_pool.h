// The library's thread pool. No kernel may let its result depend on how many threads ran it, or on which ran what.
#pragma once

#include <atomic>
#include <cstdint>

#include "cpu/next_weights.h"

namespace radix::cpu {

// How many threads an op may use, the caller included.
int num_threads();
void set_num_threads(int n, bool pin);

// The tasks of one run as one of its threads takes them. Each thread begins with a contiguous part and goes through it
// in ascending order; one that has none left takes the upper half of what the fullest part still holds. So a thread on
// a slow CPU ends with fewer, and threads on equal ones keep to their parts.
class Tasks {
 public:
  struct alignas(64) Part {
    std::atomic<uint64_t> range{0};  // grains that nobody has taken yet: the first one, and << 32 the end
  };
  Tasks(Part* parts, int count, int own, int64_t n, int64_t grains)
      : parts_(parts), count_(count), own_(parts[own].range), n_(n), grains_(grains) {}

  // The next tasks of this thread, begin .. end, about a grain; false: none are left.
  bool take(int64_t* begin, int64_t* end);
  // Whether those from the last `end` on are, as things stand, this thread's next ones.
  bool more() const;

 private:
  bool steal(int64_t* grain);

  Part* parts_;
  int count_;
  std::atomic<uint64_t>& own_;
  int64_t n_, grains_;
};

using TasksFn = void (*)(const void* context, Tasks& tasks);
void run_tasks(int64_t n, int64_t grain, TasksFn fn, const void* context);

// Calls fn(tasks) once on each of the threads that share [0, n): it takes tasks until there are none. A grain should be
// worth 10 us or more; there are no more threads than grains. Returns when all are done; what fn threw on one of the
// threads is thrown then. When the pool is busy with another thread's op, or fn itself asks for threads, the calling
// thread alone runs everything.
template <class Fn>
void run_tasks(int64_t n, int64_t grain, const Fn& fn) {
  run_tasks(n, grain, [](const void* context, Tasks& tasks) { (*static_cast<const Fn*>(context))(tasks); }, &fn);
}

// The same where a thread has nothing of its own to prepare: calls fn(begin, end) for each grain.
template <class Fn>
void parallel_for(int64_t n, int64_t grain, const Fn& fn) {
  run_tasks(n, grain, [&](Tasks& tasks) {
    for (int64_t begin, end; tasks.take(&begin, &end);) fn(begin, end);
  });
}

// From now on threads that wait fetch their shares of these weights, until this is called again: {} for none. Results
// do not depend on it.
void fetch_while_waiting(const NextWeights& weights);

}  // namespace radix::cpu
