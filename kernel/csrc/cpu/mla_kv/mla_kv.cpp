// Storing latent tokens and joining full keys for MLA on the CPU. Bound by bytes.
#include "api/mla_kv.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/tensor.h"
#include "cpu/thread_pool.h"

namespace radix::backend {
namespace {

constexpr int64_t kGrainBytes = 32 * 1024;
constexpr int kLatent = 512, kRope = 64, kGroup = 128;  // of an FP8 token
constexpr float kLargest = 448;

float widen(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

// Rounded to nearest even, clamped, NaN stays NaN.
uint8_t to_e4m3(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (x != x) return sign | 0x7f;
  const float a = std::min(std::fabs(x), kLargest);
  // Below 2^-6 the step is 2^-9; above, 3 bits of the float's mantissa remain and the exponent's bias falls by 120.
  if (a < 0x1p-6f) return sign | static_cast<uint8_t>(std::nearbyint(a * 512));
  uint32_t u;
  std::memcpy(&u, &a, 4);
  return sign | static_cast<uint8_t>(((u + 0x7ffff + (u >> 20 & 1)) >> 20) - (120 << 3));
}

// A token in the FP8 form.
void store_fp8(char* to, const char* latent, const char* rope) {
  for (int g = 0; g < kLatent / kGroup; g++) {
    float v[kGroup], largest = 1e-10f;
    for (int i = 0; i < kGroup; i++) {
      uint16_t bits;
      std::memcpy(&bits, latent + (g * kGroup + i) * 2, 2);
      v[i] = widen(bits);
      largest = std::max(largest, std::fabs(v[i]));
    }
    const float scale = largest / kLargest;
    for (int i = 0; i < kGroup; i++) to[g * kGroup + i] = static_cast<char>(to_e4m3(v[i] / scale));
    std::memcpy(to + kLatent + g * 4, &scale, 4);
  }
  std::memcpy(to + kLatent + 16, rope, kRope * 2);
}

void check_slots(const Indices& slots, int64_t limit) {
  for (int64_t t = 0; t < slots.count(); t++)
    if (slots[t] < -1 || slots[t] >= limit)
      fail(RK_INVALID, "store_mla_kv: slot_mapping[%ld] is %ld, expected -1 to %ld (slots of the cache)", t, slots[t],
           limit - 1);
}

}  // namespace

void store_mla_kv(const rk_store_mla_kv_args& a, rk_stream) {
  const Indices slots(*a.slot_mapping);
  const int64_t page_size = a.kv_cache->shape[1], item = element_size(*a.kv_cache);
  check_slots(slots, a.kv_cache->shape[0] * page_size);
  const int64_t latent_bytes = a.latent->shape[1] * 2, rope_bytes = a.rope->shape[1] * 2;
  cpu::parallel_for(slots.count(), 1 + kGrainBytes / (1 + latent_bytes + rope_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      if (slots[t] < 0) continue;
      const char* latent = data_ptr<char>(*a.latent) + t * a.latent->strides[0] * 2;
      const char* rope = data_ptr<char>(*a.rope) + t * a.rope->strides[0] * 2;
      char* to = data_ptr<char>(*a.kv_cache) + slots[t] / page_size * a.kv_cache->strides[0] * item +
                 slots[t] % page_size * a.kv_cache->strides[1] * item;
      if (item == 1) {
        store_fp8(to, latent, rope);
      } else {
        std::memcpy(to, latent, static_cast<size_t>(latent_bytes));
        std::memcpy(to + latent_bytes, rope, static_cast<size_t>(rope_bytes));
      }
    }
  });
}

void concat_mla_k(const rk_concat_mla_k_args& a, rk_stream) {
  const int64_t heads = a.k->shape[1], nope_bytes = a.k_nope->shape[2] * 2, rope_bytes = a.k_rope->shape[2] * 2;
  const int64_t bytes = 1 + heads * (nope_bytes + rope_bytes);
  cpu::parallel_for(a.k->shape[0], 1 + kGrainBytes / bytes, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      for (int64_t h = 0; h < heads; h++) {
        char* to = data_ptr<char>(*a.k) + (t * a.k->strides[0] + h * a.k->strides[1]) * 2;
        std::memcpy(to, data_ptr<char>(*a.k_nope) + (t * a.k_nope->strides[0] + h * a.k_nope->strides[1]) * 2,
                    static_cast<size_t>(nope_bytes));
        std::memcpy(to + nope_bytes, data_ptr<char>(*a.k_rope) + t * a.k_rope->strides[0] * 2,
                    static_cast<size_t>(rope_bytes));
      }
  });
}

}  // namespace radix::backend
