// The draw of contracts: scores, their order, and what a row asks for.
#pragma once

#include "common/philox.h"
#include "gpu/logits.h"

namespace radix::gpu {

// Larger floats have larger keys; -0 and 0 are one number and get one key.
__device__ inline uint32_t order_key(float x) {
  const uint32_t u = __float_as_uint(x == 0.f ? 0.f : x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ inline float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// (value, id) in one word: the larger word has the larger value or, of equals, the lower id. 0 is less than any.
__device__ inline uint64_t order_word(float x, uint32_t id) {
  return uint64_t{order_key(x)} << 32 | ~id;
}
__device__ inline uint32_t id_of(uint64_t word) {
  return ~static_cast<uint32_t>(word);
}
__device__ inline float value_of(uint64_t word) {
  return value_of(static_cast<uint32_t>(word >> 32));
}

__device__ inline float noise(uint32_t word) {
  return -logf(-log1pf(-philox_uniform(word)));
}

// x + noise(word) is at most score_bound() + 32, in units of ln 2 and give or take what `bound_margin` covers:
// -log(E) <= -log(u). `slope` is log2(e) / temperature. Infinite for the word 0.
__device__ inline float score_bound(float logit, float slope, uint32_t word) {
  return fmaf(logit, slope, -fast_log2(static_cast<float>(word)));
}
// The bound below which no score reaches this one.
__device__ inline float bound_of_score(float score) {
  return (score - (1e-3f + 1e-6f * fabsf(score))) / kLn2 - 32.f;
}

// The words of kCount blocks of ids, `step` apart, drawn together: they share the key's schedule and hide each other's
// latency.
template <int kCount>
__device__ inline void philox_each(uint64_t key, uint32_t first, uint32_t step, uint32_t position, uint32_t stream,
                                   PhiloxBlock (&out)[kCount]) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int j = 0; j < kCount; j++) out[j] = {{first + j * step, position, stream, 0}};
#pragma unroll
  for (int round = 0; round < 10; round++) {
#pragma unroll
    for (int j = 0; j < kCount; j++) {
      uint32_t(&c)[4] = out[j].word;
      const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
      c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0;
      c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1;
      c[1] = static_cast<uint32_t>(b);
      c[3] = static_cast<uint32_t>(a);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

enum class Kind { greedy, unfiltered, filtered };

// What one row asks for.
struct RowDraw {
  float temperature, top_p, min_p;
  int32_t top_k;
  uint64_t seed;
  uint32_t position, stream;
  bool has_top_k, has_top_p;

  // By the temperature alone: a row whose largest / temperature overflows is greedy too, which only the end can know.
  __device__ Kind kind() const {
    if (!(temperature > 0)) return Kind::greedy;
    return has_top_k || has_top_p || min_p > 0 ? Kind::filtered : Kind::unfiltered;
  }
  // The mass of the whole row matters only where nothing but top-p says how many ids stay.
  __device__ bool needs_mass() const { return has_top_p && !has_top_k; }

  // The four words of ids 4 * block .. 4 * block + 3.
  __device__ PhiloxBlock words(uint32_t block) const { return philox(seed, block, position, stream, 0); }
  __device__ float score(float x, uint32_t id) const {
    const PhiloxBlock block = words(id / 4);
    const uint32_t low = id & 1u ? block.word[1] : block.word[0], high = id & 1u ? block.word[3] : block.word[2];
    return x + noise(id & 2u ? high : low);
  }
};

// The settings of all rows.
struct Draw {
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int64_t *seed, *position;
  uint32_t stream;
  int64_t vocabulary;  // ids in all shards
  uint32_t first_id;   // of this shard; a multiple of 4

  __device__ RowDraw row(int64_t b) const {
    RowDraw r{temperature[b],
              top_p[b],
              min_p[b],
              top_k[b],
              static_cast<uint64_t>(seed[b]),
              static_cast<uint32_t>(position[b]),
              stream,
              false,
              false};
    r.has_top_k = r.top_k > 0 && r.top_k < vocabulary;
    r.has_top_p = r.top_p < 1;
    return r;
  }
};

}  // namespace radix::gpu
