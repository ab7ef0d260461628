// Whole-row passes of the sampler. Bound by bytes: each reads the row once, in L2 after the first; next_batch by the
// about 100 instructions of 16 or 32 ids' noise.
#include "cpu/sampling/sampling.h"

#include "cpu/sampling/philox_lanes.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
constexpr int kWordIds = 32;  // of a word of a mask
static_assert(kWordIds % W == 0);
constexpr int64_t kBlock = 4096;  // elements summed in float32 before they join the float64 sum

// The lanes of ids [i, i + W).
template <bool Masked>
Mask allowed_lanes(const uint32_t* allowed, int64_t i) {
  return bit_mask(Masked ? allowed[i / 32] >> (i % 32) : 0xFFFFFFFFu);
}

template <bool Masked>
bool is_allowed(const uint32_t* allowed, int64_t i) {
  return !Masked || (allowed[i / 32] >> (i % 32) & 1u);
}

template <bool Masked>
float row_max(const float* x, const uint32_t* allowed, int64_t n) {
  const Vec none = set1(-__builtin_inff());
  Vec top[2] = {none, none};
  float result = -__builtin_inff(), odd = 0;
  Vec nan[2] = {zero(), zero()};  // x * 0 is 0 or, for NaN and infinities, NaN
  int64_t i = 0;
  for (; i + kWordIds <= n; i += kWordIds) {
    const uint32_t word = Masked ? allowed[i / kWordIds] : 0;
    if (Masked && word == 0) continue;
    for (int j = 0; j < kWordIds; j += W) {
      Vec v = load_apart(x + i + j), finite = v;
      if constexpr (Masked) {
        const Mask lanes = bit_mask(word >> j);
        v = select(lanes, v, none);
        finite = select(lanes, finite, zero());
      }
      const int half = j / W % 2;
      top[half] = max(v, top[half]);  // keeps top when v is NaN
      nan[half] = nan[half] + finite * zero();
    }
  }
  for (; i < n; i++) {
    if (!is_allowed<Masked>(allowed, i)) continue;
    if (x[i] > result) result = x[i];
    odd += x[i] * 0.f;
  }
  const float vector_max = reduce_max(max(top[0], top[1]));
  if (vector_max > result) result = vector_max;
  odd += reduce_sum(nan[0] + nan[1]);
  if (odd == odd) return result;
  // Infinities also end here: only a real NaN counts.
  for (i = 0; i < n; i++)
    if (is_allowed<Masked>(allowed, i) && x[i] != x[i]) return x[i];
  return result;
}

float allowed_max(const float* x, const uint32_t* allowed, int64_t n) {
  return allowed ? row_max<true>(x, allowed, n) : row_max<false>(x, allowed, n);
}

template <bool Masked>
int64_t find_in(const float* x, const uint32_t* allowed, float value, int64_t begin, int64_t end) {
  int64_t i = begin;
  while (i < end && !(x[i] == value && is_allowed<Masked>(allowed, i))) i++;
  return i;
}

template <bool Masked>
int64_t find(const float* x, const uint32_t* allowed, float value, int64_t n) {
  int64_t i = 0;
#if RK_ISA_LEVEL >= 1
  const Vec least = set1(value), none = set1(-__builtin_inff());
  for (; i + kWordIds <= n; i += kWordIds) {
    const uint32_t word = Masked ? allowed[i / kWordIds] : 0;
    if (Masked && word == 0) continue;
    Vec largest = none;
    for (int j = 0; j < kWordIds; j += W) {
      const Vec v = load_apart(x + i + j);
      largest = max(Masked ? select(bit_mask(word >> j), v, none) : v, largest);
    }
    if (!any_at_least(largest, least)) continue;
    const int64_t at = find_in<Masked>(x, allowed, value, i, i + kWordIds);
    if (at < i + kWordIds) return at;
  }
#endif
  return find_in<Masked>(x, allowed, value, i, n);
}

int64_t find_allowed(const float* x, const uint32_t* allowed, float value, int64_t n) {
  return allowed ? find<true>(x, allowed, value, n) : find<false>(x, allowed, value, n);
}

template <bool Masked>
void divide(const float* x, const uint32_t* allowed, float divisor, float* out, int64_t n) {
  const Vec d = set1(divisor), none = set1(-__builtin_inff());
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const Vec v = load_apart(x + i) / d;
    store(out + i, Masked ? select(allowed_lanes<Masked>(allowed, i), v, none) : v);
  }
  for (; i < n; i++) out[i] = is_allowed<Masked>(allowed, i) ? x[i] / divisor : -__builtin_inff();
}

void divide_allowed(const float* x, const uint32_t* allowed, float divisor, float* out, int64_t n) {
  return allowed ? divide<true>(x, allowed, divisor, out, n) : divide<false>(x, allowed, divisor, out, n);
}

double sum_exp(const float* x, float shift, int64_t n) {
  const Vec s = set1(shift);
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    Vec sum = zero();
    int64_t i = begin;
    for (; i + W <= end; i += W) sum = sum + exp(load(x + i) - s);
    float lanes[W];
    if (i < end) {
      store(lanes, exp(load(x + i, static_cast<int>(end - i)) - s));
      for (int64_t j = i; j < end; j++) total += static_cast<double>(lanes[j - i]);
    }
    total += static_cast<double>(reduce_sum(sum));
  }
  return total;
}

void exponentials(const float* x, float shift, float* out, int64_t n) {
  const Vec s = set1(shift);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, exp(load(x + i) - s));
  if (i < n) store(out + i, exp(load(x + i, static_cast<int>(n - i)) - s), static_cast<int>(n - i));
}

#if RK_ISA_LEVEL >= 1
// At least the noise of each word, as noise_bound() in row.cpp, words below 256 all as the smallest. Added to x it is
// rounded once, as the noise is, so that no sum that is rounded up is missed.
Vec noise_bound(Blocks words) {
  constexpr float kLn2 = 0.693147181f;
  return fnma(log2_of_256th(words), set1(kLn2), set1(24 * kLn2 + 1e-3f));
}

bool next_batch(const float* x, int64_t begin, int64_t end, const DrawKey& key, float least, DrawBatch* batch) {
  static_assert(kIds <= DrawBatch::kMost);
  const Vec enough = set1(least);
  for (int64_t first = begin; first < end; first += kIds) {
    Blocks words[2];
    philox_words(key.seed, static_cast<uint32_t>(first / 4), key.position, key.stream, words);
    bool found = false;
    for (int half = 0; half < 2; half++) {
      const int64_t at = first + half * W, left = end - at;
      const Vec v = left >= W ? load(x + at) : left > 0 ? load(x + at, static_cast<int>(left)) : zero();
      found |= any_at_least(v + noise_bound(words[half]), enough);
    }
    if (!found) continue;
    batch->first = first;
    batch->count = kIds;
    for (int half = 0; half < 2; half++) store_words(batch->words + half * W, words[half]);
    return true;
  }
  return false;
}
#else
bool next_batch(const float*, int64_t begin, int64_t end, const DrawKey& key, float, DrawBatch* batch) {
  if (begin >= end) return false;
  const PhiloxBlock block = philox(key.seed, static_cast<uint32_t>(begin / 4), key.position, key.stream, 0);
  batch->first = begin;
  batch->count = 4;
  for (int i = 0; i < 4; i++) batch->words[i] = block.word[i];
  return true;
}
#endif

}  // namespace

const SamplingKernels sampling_table = {allowed_max, find_allowed, divide_allowed, sum_exp, exponentials, next_batch};

}  // namespace radix::cpu::RK_ISA
