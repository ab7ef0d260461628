// AMX tiles of 16 rows x 64 bytes for attention, and the two register shuffles that feed them.
#pragma once

#include "cpu/tiles.h"

#if RK_HAS_TILES

#include "cpu/attention/transpose.h"

namespace radix::cpu::RK_ISA {

constexpr int kTile = 16;                  // rows of a tile, and its columns of 4 bytes
constexpr int kTileWords = kTile * kTile;  // 1 KiB
static_assert(kTile * 4 == 64, "a row of a tile is a line");

// The tiles' shapes and, as long, the flags of float arithmetic: a probability that underflows becomes 0 without the
// processor's slow path.
class TileScope {
 public:
  TileScope() {
    TileShapes shapes;
    for (int i = 0; i < 8; i++) {
      shapes.bytes_per_row[i] = 64;
      shapes.rows[i] = kTile;
    }
    shapes.load();
    _mm_setcsr(flags_ | _MM_FLUSH_ZERO_ON);
  }
  ~TileScope() {
    _mm_setcsr(flags_);
    tile_release();
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  const unsigned flags_ = _mm_getcsr();
};

#if RK_ISA_LEVEL >= 2

// row(i): 64 bytes, i < 16. out: their words, transposed.
template <class Row>
inline void transpose_words(uint32_t* out, const Row& row) {
  __m512i words[16];
  for (int i = 0; i < 16; i++) words[i] = _mm512_loadu_si512(row(i));
  transpose16(words);
  for (int i = 0; i < 16; i++) _mm512_store_si512(out + i * 16, words[i]);
}

// Rounds to nearest even; the bf16 is the high half of a word. NaN stays NaN.
inline __m512i rounded(Vec x) {
  const __m512i u = _mm512_castps_si512(x.v), one = _mm512_set1_epi32(1);
  const __m512i up = _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(u, 16), one), _mm512_set1_epi32(0x7fff));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(_mm512_add_epi32(u, up), nan, u, _mm512_set1_epi32(0x400000));
}

// a's high halves below b's.
inline __m512i high_halves(__m512i a, __m512i b) {
  const __m512i down = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_mask_shuffle_epi8(b, 0x3333333333333333u, a, down);
}

// Row r < rows of 16 is written to out(r): dims (16 or 32) elements x[d * stride + r] * factor[r].
template <class Row>
inline void store_lanes(const float* x, int64_t stride, const float* factor, int64_t dims, int64_t rows,
                        const Row& out) {
  const Vec by = load(factor);
  __m512i words[16] = {};
  for (int i = 0; i < 16; i++)
    if (2 * i < dims)
      words[i] = high_halves(rounded(load(x + 2 * i * stride) * by), rounded(load(x + (2 * i + 1) * stride) * by));
  transpose16(words);
  const __mmask16 mask = dims == 32 ? 0xffff : 0xff;
  for (int r = 0; r < 16; r++)
    if (r < rows) _mm512_mask_storeu_epi32(out(r), mask, words[r]);
}

// Words of two bf16, a's in the low half. Rounds ties away from zero; for values of at least 0, and NaN.
inline void store_pairs(uint32_t* out, Vec a, Vec b) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_add_epi32(_mm512_castps_si512(a.v), half);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(b.v), half);
  _mm512_storeu_si512(out, high_halves(low, high));
}

// The inverse, exact.
inline void load_pairs(const uint32_t* in, Vec& a, Vec& b) {
  const __m512i words = _mm512_loadu_si512(in);
  a.v = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  b.v = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// row(i): 16 bf16, i < 32. out: word [i][j] holds element i of rows 2 j (in its low half) and 2 j + 1.
template <class Row>
inline void transpose_pairs(uint32_t* out, const Row& row) {
  __m512i words[16];
  for (int i = 0; i < 16; i++) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(2 * i)));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(2 * i + 1)));
    words[i] = interleaved_halves(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
  transpose16(words);
  for (int i = 0; i < 16; i++) _mm512_store_si512(out + i * 16, words[i]);
}

#else

template <class Row>
inline void transpose_words(uint32_t* out, const Row& row) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) std::memcpy(out + i * 16 + j, reinterpret_cast<const char*>(row(j)) + i * 4, 4);
}
template <class Row>
inline void store_lanes(const float* x, int64_t stride, const float* factor, int64_t dims, int64_t rows,
                        const Row& out) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t d = 0; d < dims; d += Vec::width) {
      float lanes[Vec::width];
      for (int i = 0; i < Vec::width; i++) lanes[i] = x[(d + i) * stride + r] * factor[r];
      store(reinterpret_cast<bf16*>(out(r)) + d, load(lanes));
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
template <class Row>
inline void transpose_pairs(uint32_t* out, const Row& row) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) out[i * 16 + j] = row(2 * j)[i].bits | uint32_t{row(2 * j + 1)[i].bits} << 16;
}

#endif

}  // namespace radix::cpu::RK_ISA

#endif
