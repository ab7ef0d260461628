// The eight AMX tiles of a thread: 16 rows x 64 bytes each, or less.
//
// Built with RADIX_EMULATE_TILES the kernels on tiles run where there is no AMX, slowly, so that their logic can be
// tested there.
#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) || defined(RADIX_EMULATE_TILES)
#define RK_HAS_TILES 1
#else
#define RK_HAS_TILES 0
#endif

// `linear` on tiles needs AVX512-BF16, too.
#if RK_HAS_TILES && defined(__AVX512BF16__)
#define RK_HAS_PRODUCT_TILES 1
#else
#define RK_HAS_PRODUCT_TILES 0
#endif

#if RK_HAS_TILES

#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "cpu/simd_scalar.h"

namespace radix::cpu::RK_ISA {

// Per thread, and other libraries change them: load at every kernel's entry, release at its end (tile_release), so that
// the kernel does not save 8 KiB of state at each context switch.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};

  inline void load() const;
};
static_assert(sizeof(TileShapes) == 64);

// Whether a load or store keeps its place among other accesses of memory, or its kernel sees to that once around many.
enum class Order { kMemory, kNone };

#if defined(__AMX_BF16__)

// gcc 12's intrinsic declares 8 of the 64 bytes as input and drops the other stores.
void TileShapes::load() const {
  asm volatile("ldtilecfg %0" ::"m"(*reinterpret_cast<const char(*)[64]>(this)) : "memory");
}
inline void tile_release() {
  _tile_release();
}

// In assembly: the intrinsics take literal numbers only and do not say which memory they read and write.
template <int T>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T, Order kOrder = Order::kMemory>
inline void tile_load(const void* p, int64_t row_bytes) {
  if constexpr (kOrder == Order::kMemory) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(T) : "memory");
  } else {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(T));
  }
}
// Around L1: for what will not be loaded again soon.
template <int T, Order kOrder = Order::kMemory>
inline void tile_stream_load(const void* p, int64_t row_bytes) {
  if constexpr (kOrder == Order::kMemory) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(T) : "memory");
  } else {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(T));
  }
}
template <int T, Order kOrder = Order::kMemory>
inline void tile_store(void* p, int64_t row_bytes) {
  if constexpr (kOrder == Order::kMemory) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row_bytes), "i"(T) : "memory");
  } else {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row_bytes), "i"(T));
  }
}
// C[i][j] += sum over k of A[i][k] B[k / 2][2 j + k % 2], bf16.
template <int C, int A, int B>
inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// C[i][j] += sum over k of A[i][k] B[k / 4][4 j + k % 4], int8.
template <int C, int A, int B>
inline void tile_dot_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

struct EmulatedTiles {
  TileShapes shapes;
  uint32_t words[8][16][16];
};
inline thread_local EmulatedTiles emulated_tiles;

void TileShapes::load() const {
  emulated_tiles.shapes = *this;
  std::memset(emulated_tiles.words, 0, sizeof emulated_tiles.words);
}
inline void tile_release() {}
template <int T>
void tile_zero() {
  std::memset(emulated_tiles.words[T], 0, sizeof emulated_tiles.words[T]);
}
template <int T, Order = Order::kMemory>
void tile_load(const void* p, int64_t row_bytes) {
  const TileShapes& shapes = emulated_tiles.shapes;
  tile_zero<T>();
  for (int i = 0; i < shapes.rows[T]; i++)
    std::memcpy(emulated_tiles.words[T][i], static_cast<const char*>(p) + i * row_bytes, shapes.bytes_per_row[T]);
}
template <int T, Order = Order::kMemory>
void tile_stream_load(const void* p, int64_t row_bytes) {
  tile_load<T>(p, row_bytes);
}
template <int T, Order = Order::kMemory>
void tile_store(void* p, int64_t row_bytes) {
  const TileShapes& shapes = emulated_tiles.shapes;
  for (int i = 0; i < shapes.rows[T]; i++)
    std::memcpy(static_cast<char*>(p) + i * row_bytes, emulated_tiles.words[T][i], shapes.bytes_per_row[T]);
}
// Subnormal operands and results count as zero.
inline float flushed(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x;
}
inline float bf16_at(uint32_t word, int half) {
  return flushed(float_of(half == 0 ? word << 16 : word & 0xffff0000u));
}
// The chain of the even products plus that of the odd ones, as the instruction was seen to add.
template <int C, int A, int B>
void tile_dot() {
  auto& words = emulated_tiles.words;
  for (int i = 0; i < emulated_tiles.shapes.rows[C]; i++)
    for (int j = 0; j < 16; j++) {
      float chain[2] = {};
      for (int k = 0; k < emulated_tiles.shapes.rows[B]; k++)
        for (int half = 0; half < 2; half++)
          chain[half] = flushed(std::fma(bf16_at(words[A][i][k], half), bf16_at(words[B][k][j], half), chain[half]));
      const float sum = flushed(chain[0] + chain[1]);
      words[C][i][j] = bits_of(flushed(float_of(words[C][i][j]) + sum));
    }
}
template <int C, int A, int B>
void tile_dot_int8() {
  auto& words = emulated_tiles.words;
  for (int i = 0; i < emulated_tiles.shapes.rows[C]; i++)
    for (int k = 0; k < emulated_tiles.shapes.rows[B]; k++)
      for (int j = 0; j < 16; j++) {
        int8_t a[4], b[4];
        std::memcpy(a, &words[A][i][k], sizeof a);
        std::memcpy(b, &words[B][k][j], sizeof b);
        for (int byte = 0; byte < 4; byte++) words[C][i][j] += static_cast<uint32_t>(a[byte] * b[byte]);
      }
}

#endif

#if RK_ISA_LEVEL >= 2
// Elements of 16 bits: those of the low half at even places, those of the high half behind each.
inline __m512i interleaved_halves(__m512i a) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), a);
}
#endif

}  // namespace radix::cpu::RK_ISA

#endif
