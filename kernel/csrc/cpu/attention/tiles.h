// AMX tiles of 16 rows x 64 bytes for attention, and the two register shuffles that feed them.
//
// Built with RADIX_EMULATE_TILES the same kernels run on any level, slowly, so that their logic can be tested on a
// machine without AMX.
#pragma once

#if defined(__AMX_BF16__)
#define RK_HAS_TILES 1
#include <immintrin.h>
#elif defined(RADIX_EMULATE_TILES)
#define RK_HAS_TILES 1
#else
#define RK_HAS_TILES 0
#endif

#if RK_HAS_TILES

#include "cpu/attention/transpose.h"

namespace radix::cpu::RK_ISA {

constexpr int kTile = 16;            // rows of a tile, and its columns of 4 bytes
constexpr int kTileWords = 16 * 16;  // 1 KiB

#if defined(__AMX_BF16__)

// Tile shapes are per thread and other libraries change them: set at every kernel's entry, released at its end. So are
// the flags of float arithmetic: a probability that underflows becomes 0 without the processor's slow path.
class TileScope {
 public:
  TileScope() {
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    for (int i = 0; i < 8; i++) {
      config.bytes_per_row[i] = 64;
      config.rows[i] = kTile;
    }
    // gcc 12's intrinsic declares 8 of the 64 bytes as input and drops the other stores.
    asm volatile("ldtilecfg %0" ::"m"(*reinterpret_cast<const char(*)[64]>(&config)) : "memory");
    _mm_setcsr(flags_ | _MM_FLUSH_ZERO_ON);
  }
  ~TileScope() {
    _mm_setcsr(flags_);
    _tile_release();
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  const unsigned flags_ = _mm_getcsr();
};

// In assembly: the intrinsics take literal numbers only and do not say which memory they read and write.
template <int T>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* p, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(T) : "memory");
}
// Around L1: for what will not be loaded again soon.
template <int T>
inline void tile_stream_load(const void* p, int64_t row_bytes) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* p, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row_bytes), "i"(T) : "memory");
}
// C[i][j] += sum over k of A[i][k] B[k / 2][2 j + k % 2], 32 bf16 k.
template <int C, int A, int B>
inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

inline thread_local uint32_t emulated_tiles[8][kTile][kTile];
struct TileScope {
  TileScope() {}
};
template <int T>
void tile_zero() {
  std::memset(emulated_tiles[T], 0, sizeof emulated_tiles[T]);
}
template <int T>
void tile_load(const void* p, int64_t row_bytes) {
  for (int i = 0; i < kTile; i++) std::memcpy(emulated_tiles[T][i], static_cast<const char*>(p) + i * row_bytes, 64);
}
template <int T>
void tile_stream_load(const void* p, int64_t row_bytes) {
  tile_load<T>(p, row_bytes);
}
template <int T>
void tile_store(void* p, int64_t row_bytes) {
  for (int i = 0; i < kTile; i++) std::memcpy(static_cast<char*>(p) + i * row_bytes, emulated_tiles[T][i], 64);
}
template <int C, int A, int B>
void tile_dot() {
  for (int i = 0; i < kTile; i++)
    for (int k = 0; k < kTile; k++)
      for (int j = 0; j < kTile; j++) {
        const uint32_t a = emulated_tiles[A][i][k], b = emulated_tiles[B][k][j];
        float c = float_of(emulated_tiles[C][i][j]);
        c += float_of(a << 16) * float_of(b << 16);
        c += float_of(a & 0xffff0000u) * float_of(b & 0xffff0000u);
        emulated_tiles[C][i][j] = bits_of(c);
      }
}

#endif

#if RK_ISA_LEVEL >= 2

// A 16 x 16 matrix of words, in place. x: 64-byte aligned.
inline void transpose16(uint32_t* x) {
  __m512i rows[16];
  for (int i = 0; i < 16; i++) rows[i] = _mm512_load_si512(x + i * 16);
  transpose16(rows);
  for (int i = 0; i < 16; i++) _mm512_store_si512(x + i * 16, rows[i]);
}

// Words of two bf16, a's in the low half. Rounds ties away from zero; for values of at least 0, and NaN.
inline void store_pairs(uint32_t* out, Vec a, Vec b) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(a.v), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(b.v), half);
  _mm512_storeu_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaau, low, high));
}

// The inverse, exact.
inline void load_pairs(const uint32_t* in, Vec& a, Vec& b) {
  const __m512i words = _mm512_loadu_si512(in);
  a.v = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  b.v = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Row a and row b of 16 bf16 as words, a's in the low half.
inline void interleave16(uint32_t* out, const bf16* a, const bf16* b) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
  _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

#else

inline void transpose16(uint32_t* x) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < i; j++) {
      const uint32_t t = x[i * 16 + j];
      x[i * 16 + j] = x[j * 16 + i];
      x[j * 16 + i] = t;
    }
}
inline void store_pairs(uint32_t* out, Vec a, Vec b) {
  float low[Vec::width], high[Vec::width];
  store(low, a);
  store(high, b);
  for (int i = 0; i < Vec::width; i++)
    out[i] = (bits_of(low[i]) + 0x8000u) >> 16 | ((bits_of(high[i]) + 0x8000u) & 0xffff0000u);
}
inline void load_pairs(const uint32_t* in, Vec& a, Vec& b) {
  float low[Vec::width], high[Vec::width];
  for (int i = 0; i < Vec::width; i++) {
    low[i] = float_of(in[i] << 16);
    high[i] = float_of(in[i] & 0xffff0000u);
  }
  a = load(low);
  b = load(high);
}
inline void interleave16(uint32_t* out, const bf16* a, const bf16* b) {
  for (int i = 0; i < 16; i++) out[i] = a[i].bits | uint32_t{b[i].bits} << 16;
}

#endif

}  // namespace radix::cpu::RK_ISA

#endif
