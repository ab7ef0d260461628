// The draw that docs/numerics.md defines: scores, their order, and what a row asks for.
#pragma once

#include <cfloat>

#include "common/philox.h"
#include "gpu/sampling/logits.h"

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

// At least x + noise(word), in units of ln 2 and less 32, give or take what `bound_of_score` covers: -log(E) <=
// -log(u). `slope` is log2(e) / temperature. Infinite for the word 0.
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
    for (int j = 0; j < kCount; j++) out[j] = philox_round(out[j], k0, k1);
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
}

enum class Kind { greedy, unfiltered, filtered };

// The settings of one row.
struct RowDraw {
  float temperature, top_p, min_p;
  int32_t top_k;
  uint64_t seed;
  uint32_t position;

  __device__ bool has_top_k(int64_t vocabulary) const { return top_k > 0 && top_k < vocabulary; }
  __device__ bool has_top_p() const { return top_p < 1; }
  // By the temperature alone: a row whose largest / temperature overflows is greedy too, which only the end can know.
  __device__ Kind kind(int64_t vocabulary) const {
    // All at once: a setting asked for after another would cost the time of one more access.
    const int filters = int{has_top_k(vocabulary)} | int{has_top_p()} | int{min_p > 0};
    return !(temperature > 0) ? Kind::greedy : filters ? Kind::filtered : Kind::unfiltered;
  }
  // Probabilities need the mass of the whole row only where nothing but top-p says how many ids stay.
  __device__ bool needs_mass(int64_t vocabulary) const { return has_top_p() && !has_top_k(vocabulary); }
  // What divides the logits: infinity would make NaN of those that are -inf.
  __device__ float divisor() const { return fminf(temperature, FLT_MAX); }
  // log2(e) / temperature, for bounds.
  __device__ float slope() const { return fminf(kLog2e / divisor(), FLT_MAX); }
  // Whether a moderate bound speaks of moderate logits.
  __device__ bool is_moderate() const { return temperature > 1e-20f && temperature < 1e20f; }
};

// The settings of all rows.
struct Draw {
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int64_t *seed, *position;
  uint32_t stream;
  int64_t vocabulary;  // ids in all shards
  uint32_t first_id;   // of this shard; a multiple of 4

  // Normalised: a temperature that is no normal number is 0, a min-p that is no number too, filters that leave the
  // first id alone are a top-k of 1.
  __device__ RowDraw of_row(int64_t b) const {
    const float t = temperature[b], p = top_p[b], m = min_p[b];
    const int32_t k = top_k[b];
    const float least = fminf(fmaxf(m, 0.f), 1.f);  // NaN is 0
    return {t >= FLT_MIN ? t : 0.f,
            p,
            least,
            m > 1 || p <= 0 ? 1 : k,
            static_cast<uint64_t>(seed[b]),
            static_cast<uint32_t>(position[b])};
  }
  __device__ Kind kind(int64_t b) const { return of_row(b).kind(vocabulary); }
  __device__ bool needs_mass(int64_t b) const { return of_row(b).needs_mass(vocabulary); }
  __device__ float divisor(int64_t b) const { return of_row(b).divisor(); }

  // The four words of ids 4 * block .. 4 * block + 3.
  __device__ PhiloxBlock words(int64_t b, uint32_t block) const {
    return philox(static_cast<uint64_t>(seed[b]), block, static_cast<uint32_t>(position[b]), stream, 0);
  }
  __device__ float score(int64_t b, float x, uint32_t id) const {
    const PhiloxBlock block = words(b, id / 4);
    const uint32_t low = id & 1u ? block.word[1] : block.word[0], high = id & 1u ? block.word[3] : block.word[2];
    return x + noise(id & 2u ? high : low);
  }
};

}  // namespace radix::gpu
