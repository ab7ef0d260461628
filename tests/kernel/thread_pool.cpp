// The pool by itself, run by test_thread_pool.py: what is taken, by whom, and what happens to errors.
#include "cpu/thread_pool.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

using namespace radix::cpu;

namespace {

void require(bool holds, const char* what, long a = 0, long b = 0, long c = 0) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s (%ld, %ld, %ld)\n", what, a, b, c);
  std::_Exit(1);
}

// Waits for it; a task that is never run would be waited for forever.
template <class Ready>
void wait_for(const Ready& ready, const char* what) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!ready()) {
    require(std::chrono::steady_clock::now() < end, what);
    std::this_thread::yield();
  }
}

void every_task_is_taken_once() {
  for (int threads : {1, 2, 3, 7}) {
    set_num_threads(threads, false);
    for (long n : {0L, 1L, 2L, 5L, 64L, 1000L, 200'000L})
      for (long grain : {1L, 3L, 64L, 5000L}) {
        std::vector<std::atomic<int>> taken(n);
        std::atomic<long> bodies{0}, grains{0};
        run_tasks(n, grain, [&](Tasks& tasks) {
          bodies++;
          for (int64_t begin, end; tasks.take(&begin, &end); grains++) {
            require(begin < end && 0 <= begin && end <= n, "a range within the tasks", n, grain, threads);
            for (int64_t i = begin; i < end; i++) taken[i]++;
          }
        });
        for (long i = 0; i < n; i++) require(taken[i] == 1, "every task once", n, grain, threads);
        const long most = (n + grain - 1) / grain;
        require(bodies <= threads && bodies <= most, "no more threads than there are grains", n, grain, threads);
        require(grains <= most + threads, "no smaller grains than asked for", n, grain, threads);
      }
  }
}

// A thread goes through its own part in order, and knows that it will. The others wait: they would take some of it, and
// what a thread takes from others may follow its own by chance.
void parts_are_contiguous() {
  set_num_threads(3, false);
  for (int turn = 0; turn < 200; turn++) {
    std::atomic<bool> part_done{false};
    run_tasks(300, 1, [&](Tasks& tasks) {
      int64_t begin, end;
      if (!tasks.take(&begin, &end)) return;
      if (begin == 0) {
        for (int64_t task = 0; task < 100; task++) {
          require(begin == task && end == task + 1, "the part in order", task, begin, end);
          require(tasks.more() == (task < 99), "what follows is announced", task);
          if (task < 99) require(tasks.take(&begin, &end), "all of the part", task);
        }
        part_done = true;
      }
      wait_for([&] { return part_done.load(); }, "the first part is gone through");
      while (tasks.take(&begin, &end)) {
      }
      require(!tasks.more(), "nothing is announced at the end");
    });
  }
}

// Whoever gets task 0 is held up until all others are done: the rest of that thread's part too.
void a_slow_thread_loses_its_tasks() {
  set_num_threads(2, false);
  for (int turn = 0; turn < 50; turn++) {
    std::atomic<int> done{0};
    parallel_for(64, 1, [&](int64_t begin, int64_t end) {
      if (begin == 0) wait_for([&] { return done == 64 - (end - begin); }, "the others take a held-up thread's tasks");
      done += static_cast<int>(end - begin);
    });
    require(done == 64, "all are done");
  }
}

void errors_and_nested_runs() {
  set_num_threads(2, false);
  for (int64_t bad : {0, 63}) {
    bool thrown = false;
    try {
      parallel_for(64, 1, [&](int64_t begin, int64_t end) {
        if (begin <= bad && bad < end) throw std::runtime_error("task");
      });
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    require(thrown, "an error reaches the caller", bad);
  }
  std::atomic<int> done{0};
  parallel_for(8, 1, [&](int64_t, int64_t) {
    const auto self = std::this_thread::get_id();
    parallel_for(100, 1, [&](int64_t begin, int64_t end) {
      require(std::this_thread::get_id() == self, "a run inside of another stays on its thread");
      done += static_cast<int>(end - begin);
    });
  });
  require(done == 800, "all of the inner runs", done);
}

// Two callers at once: one has the pool, the other runs alone.
void two_callers() {
  set_num_threads(3, false);
  std::atomic<long> sum{0};
  const auto caller = [&] {
    for (int turn = 0; turn < 2000; turn++)
      parallel_for(10, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  };
  std::thread other(caller);
  caller();
  other.join();
  require(sum == 2 * 2000 * 10, "all of both", sum);
}

// The shares of the threads are the whole streams, one behind the other, as far as a thread fetches at all.
void shares_are_the_streams() {
  static const char weights[64] = {};
  for (long bytes : {0L, 1L, 4096L, 40'000L, 100'000L})
    for (int streams : {1, 2})
      for (int threads : {1, 2, 3, 7}) {
        const NextWeights all{weights, bytes, streams, threads};
        int64_t end = 0;
        for (int thread = 0; thread < threads; thread++) {
          const WeightsShare share = share_of(all, thread);
          require(share.first % 64 == 0, "whole lines", bytes, threads, thread);
          require(share.first <= end && end < share.first + 64, "the next line", bytes, threads, thread);
          end = share.end;
        }
        require(end == bytes / streams, "the whole stream", bytes, streams, threads);
        require(share_of(all, threads).end == 0, "none for a thread too many", bytes, streams, threads);
      }
  const WeightsShare large = share_of({weights, 1 << 30, 2, 4}, 3);
  require(large.first == 3L << 27 && large.end == large.first + (64 << 10), "128 KiB", large.first, large.end);
}

long steps(ShareFetch& fetch, const NextWeightsBoard& board, int thread) {
  long count = 0;
  while (fetch.step(board, thread)) require(++count < 10'000, "an end");
  return count;
}

void a_share_is_fetched_once() {
  static const char weights[40'000] = {};
  NextWeightsBoard board;
  ShareFetch fetch;
  require(steps(fetch, board, 0) == 0, "nothing before anything is put");
  for (int turn = 0; turn < 2; turn++) {
    board.put({weights, sizeof weights, 2, 2});
    require(steps(fetch, board, 1) == (20'000 - 9'984 + 127) / 128, "two lines a step");
    require(steps(fetch, board, 1) == 0, "once");
  }
  board.put({weights, sizeof weights, 2, 2});
  require(fetch.step(board, 1), "anew");
  board.put({});
  require(steps(fetch, board, 1) == 0, "nothing any more");
}

}  // namespace

int main() {
  shares_are_the_streams();
  a_share_is_fetched_once();
  {
    const std::vector<char> weights(300'000);  // waiting threads fetch it long after it is gone
    set_num_threads(2, false);
    fetch_while_waiting({weights.data(), 300'000, 2, 5});
  }
  every_task_is_taken_once();
  parts_are_contiguous();
  a_slow_thread_loses_its_tasks();
  errors_and_nested_runs();
  two_callers();
  std::_Exit(0);  // the workers go on
}
