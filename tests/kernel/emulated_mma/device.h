// What nvcc gives device code, for g++: a block's threads are fibers that take turns, and ldmatrix and mma.sync
// exchange what a warp's lanes hold. Included ahead of every source. CUDA's own headers have the types; without nvcc
// CUTLASS copies at once where a GPU would copy asynchronously, so missing waits are not seen.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
using std::max;
using std::min;

namespace emulated {

constexpr int kWarp = 32, kMostThreads = 1024;
constexpr size_t kStackBytes = 1 << 18;

inline uint3 thread, block;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  bool done = false;
};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline std::function<void()> kernel;

struct Barrier {
  int arrived = 0, generation = 0;

  void wait(int count) {
    const int now = generation;
    if (++arrived == count) {
      arrived = 0;
      generation++;
      return;
    }
    while (generation == now) swapcontext(&fibers[thread.x].context, &scheduler);
  }
};
inline Barrier block_barrier, warp_barriers[kMostThreads / kWarp];

inline void sync_warp() {
  warp_barriers[thread.x / kWarp].wait(kWarp);
}
inline void begin_fiber() {
  kernel();
  fibers[thread.x].done = true;
}

// Runs one block.
inline void run_block(int index, int threads, std::function<void()> body) {
  kernel = std::move(body);
  block = {static_cast<unsigned>(index), 0, 0};
  fibers.clear();
  fibers.resize(threads);
  for (Fiber& fiber : fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, begin_fiber, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (unsigned i = 0; i < fibers.size(); i++) {
      if (fibers[i].done) continue;
      thread = {i, 0, 0};
      swapcontext(&scheduler, &fibers[i].context);
      any = any || !fibers[i].done;
    }
  }
}

template <class To, class From>
To reinterpret_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// ldmatrix (.x1, .x2, .x4): lane 8 i + r has the address of row r of matrix i; a lane gets word `lane % 4` of row `lane
// / 4`.
template <class Words>
void load_matrices(Words& words, const void* row) {
  static const void* rows[kMostThreads];
  rows[thread.x] = row;
  sync_warp();
  const int first = thread.x / kWarp * kWarp, lane = thread.x % kWarp;
  for (size_t i = 0; i < sizeof(Words) / 4; i++) {
    const char* from = static_cast<const char*>(rows[first + i * 8 + lane / 4]);
    std::memcpy(reinterpret_cast<char*>(&words) + i * 4, from + lane % 4 * 4, 4);
  }
  sync_warp();
}

inline double e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return code & 0x80 ? -size : size;
}
template <class In>
double value_of(uint8_t code) {
  return std::is_same_v<In, int8_t> ? static_cast<int8_t>(code) : e4m3_value(code);
}

// mma.m16n8k32 of bytes, as the PTX ISA lays out its fragments: exact, the sum rounded once to the accumulator's type.
template <class In, class Sums, class A, class B>
void multiply(Sums& out, const A& a, const B& b, const Sums& c) {
  using Sum = std::conditional_t<std::is_same_v<In, int8_t>, int32_t, float>;
  static_assert(sizeof(A) == 16 && sizeof(B) == 8 && sizeof(Sums) == 16);
  static uint8_t rows[kMostThreads][16], columns[kMostThreads][8];
  std::memcpy(rows[thread.x], &a, 16);
  std::memcpy(columns[thread.x], &b, 8);
  sync_warp();
  const int first = thread.x / kWarp * kWarp, lane = thread.x % kWarp;
  Sum sums[4];
  std::memcpy(sums, &c, sizeof sums);
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 32; k++) {
      const int lane_of_row = k % 16 / 4, half = k / 16;
      const uint8_t x = rows[first + row % 8 * 4 + lane_of_row][(row / 8 + 2 * half) * 4 + k % 4];
      const uint8_t w = columns[first + column * 4 + lane_of_row][half * 4 + k % 4];
      sum += value_of<In>(x) * value_of<In>(w);
    }
    sums[i] = static_cast<Sum>(sums[i] + sum);
  }
  std::memcpy(&out, sums, sizeof sums);
  sync_warp();
}

}  // namespace emulated

#define threadIdx emulated::thread
#define blockIdx emulated::block

inline void __syncthreads() {
  emulated::block_barrier.wait(static_cast<int>(emulated::fibers.size()));
}
inline void __syncwarp() {
  emulated::sync_warp();
}
template <class T>
T __shfl_sync(unsigned, T value, int) {
  return value;  // of what is the same in all lanes
}
inline float __uint_as_float(uint32_t x) {
  return emulated::reinterpret_bits<float>(x);
}
inline uint32_t __float_as_uint(float x) {
  return emulated::reinterpret_bits<uint32_t>(x);
}

namespace cutlass::arch {
inline int LaneId() {
  return emulated::thread.x % emulated::kWarp;
}
}  // namespace cutlass::arch
