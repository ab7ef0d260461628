// Sixteen float lanes, one per output of a packed block: one zmm, two ymm or a plain array.
//
// The packed layouts are made of 16-output lines, so this is the natural register of the linear kernels at every
// level. Sums run along k lane by lane, hence in one order for every batch size.
#pragma once

#include "cpu/simd.h"

namespace radix::cpu::RK_ISA {

struct Lanes16 {
  static constexpr int kParts = 16 / Vec::width;
  Vec part[kParts];

  void clear() {
    for (Vec& p : part) p = zero();
  }
  template <class T>
  void load_line(const T* p) {
    for (int i = 0; i < kParts; i++) part[i] = load(p + i * Vec::width);
  }
  void store_line(float* p) const {
    for (int i = 0; i < kParts; i++) store(p + i * Vec::width, part[i]);
  }
  void accumulate(float x, const Lanes16& w) {
    for (int i = 0; i < kParts; i++) part[i] = fma(set1(x), w.part[i], part[i]);
  }
};

// Splits a line of pairs: even[n] = p[2n], odd[n] = p[2n + 1]. A bf16 is the high half of its float, so a shift and a
// mask do it.
inline void load_pairs(const bf16* p, Lanes16& even, Lanes16& odd) {
#if RK_ISA_LEVEL >= 2
  const __m512i line = _mm512_loadu_si512(p);
  even.part[0].v = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16));
  odd.part[0].v = _mm512_castsi512_ps(_mm512_and_si512(line, _mm512_set1_epi32(int(0xffff0000u))));
#elif RK_ISA_LEVEL == 1
  for (int i = 0; i < 2; i++) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i);
    even.part[i].v = _mm256_castsi256_ps(_mm256_slli_epi32(half, 16));
    odd.part[i].v = _mm256_castsi256_ps(_mm256_and_si256(half, _mm256_set1_epi32(int(0xffff0000u))));
  }
#else
  float low[16], high[16];
  for (int i = 0; i < 16; i++) {
    low[i] = to_float(p[2 * i]);
    high[i] = to_float(p[2 * i + 1]);
  }
  even.load_line(low);
  odd.load_line(high);
#endif
}

}  // namespace radix::cpu::RK_ISA
