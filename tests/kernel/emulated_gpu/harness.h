// For device code that runs on the CPU: what tests say and compare with; ranks, their memory and their threads.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "gpu/comm/peer.h"

namespace emulated {

using namespace radix::gpu;

constexpr int kBlocks = 3, kBlockThreads = 4, kSide = 64;

[[noreturn]] inline void fail_test(const char* what, int call, int at) {
  std::fprintf(stderr, "%s: call %d, element %d\n", what, call, at);
  std::_Exit(1);
}

inline double e4m3_value(int code) {  // of a finite number's
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return code & 0x80 ? -size : size;
}

struct Barrier {
  explicit Barrier(int n) { pthread_barrier_init(&it, nullptr, n); }
  ~Barrier() { pthread_barrier_destroy(&it); }
  pthread_barrier_t it;
  uint64_t shared[kBlockThreads];  // what a block's threads tell each other
};
inline thread_local Barrier* current_block;

// The memory of N ranks in one process, as rk_gpu_comm lays it out.
template <int N>
struct Machine {
  std::vector<uint64_t> control = std::vector<uint64_t>(512);
  std::vector<Words> pools[N];
  std::vector<uint32_t> calls[N];

  Machine() {
    for (int r = 0; r < N; r++) {
      pools[r].assign(2 * kMaxChannels * kSide, Words{{kEmpty, kEmpty, kEmpty, kEmpty}});
      calls[r].assign(kMaxChannels, 0);
    }
  }
  PeerView view(int rank, uint64_t timeout_ns) {
    PeerView view{};
    view.rank = rank;
    view.timeout_ns = timeout_ns;
    view.control = control.data();
    view.calls = calls[rank].data();
    for (int k = 0; k < N; k++) view.pool[k] = pools[(rank + k) % N].data();
    view.side = kSide;
    return view;
  }
  bool all_empty() const {
    for (const auto& pool : pools)
      for (const Words& w : pool)
        for (uint32_t word : w.at)
          if (word != kEmpty) return false;
    return true;
  }
};

// Runs kernel(call) on every thread of a rank, one call after the other as a stream does.
template <class Kernel>
void run_rank(int calls, unsigned seed, const Kernel& kernel) {
  Barrier between(kBlocks * kBlockThreads);
  std::vector<Barrier*> blocks;
  for (int b = 0; b < kBlocks; b++) blocks.push_back(new Barrier(kBlockThreads));
  std::vector<std::thread> threads;
  for (int t = 0; t < kBlocks * kBlockThreads; t++)
    threads.emplace_back([&, t] {
      std::minstd_rand random(seed + t);
      blockDim = dim3(kBlockThreads);
      blockIdx = dim3(t / kBlockThreads);
      threadIdx = dim3(t % kBlockThreads);
      current_block = blocks[blockIdx.x];
      for (int call = 0; call < calls; call++) {
        if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        kernel(call);
        pthread_barrier_wait(&between.it);
      }
    });
  for (auto& thread : threads) thread.join();
  for (Barrier* block : blocks) delete block;
}

}  // namespace emulated

inline void block_barrier() {
  pthread_barrier_wait(&emulated::current_block->it);
}
