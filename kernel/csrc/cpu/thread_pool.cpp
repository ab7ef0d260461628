// Workers own a mailbox each; the caller posts a job to as many as it needs, begins with part 0 itself, takes the job
// back from those that have not even begun when no task is left, and waits for the rest. Both sides spin for at most
// 50 us, in which they fetch weights that come next, and then sleep on a futex. The job is written before the mailboxes
// are, and is not written again until every worker that got it has counted down, nor is the first error of its threads
// read before.
#include "cpu/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "common/error.h"
#include "cpu/core_claims.h"
#include "cpu/cpu_quota.h"
#include "cpu/next_weights.h"

namespace radix::cpu {
namespace {

using Word = std::atomic<uint32_t>;
constexpr int kMaxThreads = 1024;
constexpr int64_t kMaxGrains = 1 << 16;
constexpr auto kSpin = std::chrono::microseconds(50);

void futex_wait(Word& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake(Word& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

// The grains of a part in one word.
uint64_t pack(uint64_t begin, uint64_t end) {
  return end << 32 | begin;
}
uint32_t begin_of(uint64_t range) {
  return static_cast<uint32_t>(range);
}
uint32_t end_of(uint64_t range) {
  return static_cast<uint32_t>(range >> 32);
}
uint32_t size_of(uint64_t range) {
  return end_of(range) - begin_of(range);
}
uint64_t part_of(int64_t grains, int64_t part, int64_t parts) {
  return pack(grains * part / parts, grains * (part + 1) / parts);
}

// Polls `ready` for the spin time, calling `meanwhile` in between; false when it never came true.
template <class Ready, class Meanwhile>
bool spin_until(const Ready& ready, bool spin, const Meanwhile& meanwhile) {
  if (ready()) return true;
  if (!spin) return false;
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; i++) {
      if (ready()) return true;
      meanwhile();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

std::vector<int> affinity_cpus() {
  cpu_set_t sets[8];  // 8192 CPUs
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof sets, sets) == 0)
    for (int cpu = 0; cpu < 8 * CPU_SETSIZE; cpu++)
      if (CPU_ISSET_S(cpu, sizeof sets, sets)) cpus.push_back(cpu);
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

struct Config {
  const std::vector<int> cpus = affinity_cpus();
  std::atomic<int> threads{std::min({static_cast<int>(cpus.size()), cpu_quota(), kMaxThreads})};
};

Config& config() {
  static Config* c = new Config;  // outlives static destructors: workers may still run then
  return *c;
}

thread_local bool inside_pool = false;  // this thread is working on a part right now

class Pool {
 public:
  // false: the pool is busy, nothing was run.
  bool try_run(int64_t n, int64_t grains, int threads, TasksFn fn, const void* context) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    threads = std::min(threads, grow(threads));
    job_ = {fn, context, n, grains, threads};
    for (int t = 0; t < threads; t++) parts_[t].range.store(part_of(grains, t, threads), std::memory_order_relaxed);
    pending_.store(threads - 1, std::memory_order_relaxed);
    for (int t = 1; t < threads; t++) workers_[t - 1]->post(Worker::kWork);
    work(0);
    for (int t = 1; t < threads; t++)
      if (workers_[t - 1]->unpost()) pending_.fetch_sub(1, std::memory_order_acq_rel);
    wait_for_workers();
    const std::exception_ptr error = std::exchange(error_, nullptr);
    failed_.store(false, std::memory_order_relaxed);
    busy_.store(false, std::memory_order_release);
    if (error) std::rethrow_exception(error);
    return true;
  }

  void fetch_while_waiting(const NextWeights& weights) { next_weights_.put(weights); }

  // In a forked child: the CPUs are the parent's.
  void disown() { claims_.release(); }

  // Ends all workers; the next op starts them anew under the new configuration.
  void reconfigure(int threads, bool pin) {
    while (busy_.exchange(true, std::memory_order_acquire)) sched_yield();
    const Release at_end{busy_};
    for (auto& worker : workers_) worker->post(Worker::kStop);
    for (auto& worker : workers_) pthread_join(worker->thread, nullptr);
    workers_.clear();
    config().threads = threads;
    claims_.release();
    places_.clear();
    if (pin && spinning()) places_ = claims_.take(config().cpus, threads);
  }

 private:
  struct Job {
    TasksFn fn;
    const void* context;
    int64_t n, grains;
    int threads;
  };

  // Gives the pool back at the end of a scope, also when memory runs out in it.
  struct Release {
    std::atomic<bool>& busy;
    ~Release() { busy.store(false, std::memory_order_release); }
  };

  struct alignas(64) Worker {
    enum : uint32_t { kIdle, kWork, kStop, kAsleep };
    Word mail{kIdle};
    Pool* pool = nullptr;
    int index = 0;
    pthread_t thread{};
    ShareFetch fetch;  // the worker's own

    void post(uint32_t what) {
      if (mail.exchange(what, std::memory_order_acq_rel) == kAsleep) futex_wake(mail);
    }

    // Takes work back that the worker has not received; false: it has.
    bool unpost() {
      uint32_t work = kWork;
      return mail.compare_exchange_strong(work, kIdle, std::memory_order_acq_rel);
    }

    // What was posted; kIdle: it was taken back.
    uint32_t receive(bool spin) {
      const auto has_mail = [&] { return mail.load(std::memory_order_acquire) != kIdle; };
      if (!spin_until(has_mail, spin, [&] { pool->fetch_or_pause(fetch, index); })) {
        uint32_t idle = kIdle;
        if (mail.compare_exchange_strong(idle, kAsleep, std::memory_order_acq_rel))
          while (mail.load(std::memory_order_acquire) == kAsleep) futex_wait(mail, kAsleep);
      }
      return mail.exchange(kIdle, std::memory_order_acq_rel);
    }
  };

  static constexpr uint32_t kCallerAsleep = 1u << 31;

  static bool spinning() { return config().threads <= static_cast<int>(config().cpus.size()); }

  void work(int part) {
    const Job& job = job_;
    inside_pool = true;
    try {
      Tasks tasks(parts_.get(), job.threads, part, job.n, job.grains);
      job.fn(job.context, tasks);
    } catch (...) {
      if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
    }
    inside_pool = false;
  }

  void fetch_or_pause(ShareFetch& fetch, int thread) {
    if (!fetch.step(next_weights_, thread)) __builtin_ia32_pause();
  }

  void wait_for_workers() {
    const auto done = [&] { return pending_.load(std::memory_order_acquire) == 0; };
    if (spin_until(done, spinning(), [&] { fetch_or_pause(callers_fetch_, 0); })) return;
    uint32_t left = pending_.fetch_or(kCallerAsleep, std::memory_order_acq_rel) | kCallerAsleep;
    while (left != kCallerAsleep) {
      futex_wait(pending_, left);
      left = pending_.load(std::memory_order_acquire);
    }
  }

  static void* worker_main(void* self) {
    auto& worker = *static_cast<Worker*>(self);
    Pool& pool = *worker.pool;
    for (uint32_t mail; (mail = worker.receive(spinning())) != Worker::kStop;) {
      if (mail == Worker::kIdle) continue;
      pool.work(worker.index);
      if (pool.pending_.fetch_sub(1, std::memory_order_acq_rel) == (kCallerAsleep | 1)) futex_wake(pool.pending_);
    }
    return nullptr;
  }

  // Starts workers until `threads` (the caller included) can run; returns how many can, fewer when the system refuses a
  // thread or memory.
  int grow(int threads) noexcept {
    try {
      workers_.reserve(threads - 1);  // a thread that runs must find its place
      while (static_cast<int>(workers_.size()) < threads - 1 && start_worker()) {
      }
    } catch (const std::bad_alloc&) {
    }
    return static_cast<int>(workers_.size()) + 1;
  }

  bool start_worker() {
    auto worker = std::make_unique<Worker>();
    worker->pool = this;
    worker->index = static_cast<int>(workers_.size()) + 1;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to the caller's threads
    const int error = pthread_create(&worker->thread, nullptr, worker_main, worker.get());
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error) return false;
    if (!places_.empty()) bind(worker->thread, places_[worker->index]);
    workers_.push_back(std::move(worker));
    return true;
  }

  static void bind(pthread_t thread, int cpu) {
    cpu_set_t sets[8];
    CPU_ZERO_S(sizeof sets, sets);
    CPU_SET_S(cpu, sizeof sets, sets);
    pthread_setaffinity_np(thread, sizeof sets, sets);
  }

  const std::unique_ptr<Tasks::Part[]> parts_{new Tasks::Part[kMaxThreads]};
  std::vector<std::unique_ptr<Worker>> workers_;
  CoreClaims claims_;
  std::vector<int> places_;  // a CPU for each thread, the caller first; empty: nobody is bound
  Job job_{};
  NextWeightsBoard next_weights_;
  ShareFetch callers_fetch_;  // of whoever has made the pool busy
  std::atomic<bool> busy_{false};
  std::atomic<bool> failed_{false};  // a part of the job: error_ is what it threw
  std::exception_ptr error_;
  alignas(64) Word pending_{0};
};

std::atomic<Pool*> the_pool{nullptr};

// Made at first use, never destroyed. A forked child has no workers: it forgets its parent's pool and makes its own.
Pool& pool() {
  Pool* p = the_pool.load(std::memory_order_acquire);
  if (p) return *p;
  static const int hook = pthread_atfork(nullptr, nullptr, [] {
    if (Pool* parents = the_pool.exchange(nullptr)) parents->disown();
    inside_pool = false;
  });
  (void)hook;
  auto made = std::make_unique<Pool>();
  if (the_pool.compare_exchange_strong(p, made.get())) p = made.release();
  return *p;
}

}  // namespace

int num_threads() {
  return config().threads;
}

void set_num_threads(int n, bool pin) {
  if (n < 1 || n > kMaxThreads) fail(RK_INVALID, "set_num_threads: n is %d, expected 1 to %d", n, kMaxThreads);
  pool().reconfigure(n, pin);
}

void fetch_while_waiting(const NextWeights& weights) {
  if (num_threads() > 1) pool().fetch_while_waiting(weights);
}

bool Tasks::take(int64_t* begin, int64_t* end) {
  int64_t grain = 0;
  uint64_t range = own_.load(std::memory_order_relaxed);
  while (size_of(range) > 0 && !own_.compare_exchange_weak(range, range + 1, std::memory_order_relaxed)) {
  }
  if (size_of(range) > 0) {
    grain = begin_of(range);
  } else if (!steal(&grain)) {
    return false;
  }
  *begin = n_ * grain / grains_;
  *end = n_ * (grain + 1) / grains_;
  return true;
}

bool Tasks::more() const {
  return size_of(own_.load(std::memory_order_relaxed)) > 0;
}

// Own_ is empty, which nobody else changes.
bool Tasks::steal(int64_t* grain) {
  for (;;) {
    std::atomic<uint64_t>* fullest = nullptr;
    uint64_t range = 0;
    for (int part = 0; part < count_; part++) {
      const uint64_t other = parts_[part].range.load(std::memory_order_relaxed);
      if (size_of(other) <= size_of(range)) continue;
      fullest = &parts_[part].range;
      range = other;
    }
    if (!fullest) return false;
    const uint32_t end = end_of(range), middle = end - (size_of(range) + 1) / 2;
    if (!fullest->compare_exchange_strong(range, pack(begin_of(range), middle), std::memory_order_relaxed)) continue;
    *grain = middle;
    own_.store(pack(middle + 1, end), std::memory_order_relaxed);
    return true;
  }
}

void run_tasks(int64_t n, int64_t grain, TasksFn fn, const void* context) {
  if (n <= 0) return;
  const int64_t wanted = (n + grain - 1) / std::max<int64_t>(grain, 1);
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), wanted));
  if (threads > 1 && !inside_pool) {
    // As many for each thread.
    const int64_t grains = std::min((std::min(wanted, kMaxGrains) + threads - 1) / threads * threads, n);
    if (pool().try_run(n, grains, threads, fn, context)) return;
  }
  Tasks::Part all;
  all.range.store(pack(0, 1), std::memory_order_relaxed);
  Tasks tasks(&all, 1, 0, n, 1);
  fn(context, tasks);
}

}  // namespace radix::cpu
