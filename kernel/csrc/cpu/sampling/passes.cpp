// Whole-row passes of the sampler. Bound by bytes: each reads the row once, in L2 after the first.
#include "cpu/sampling/sampling.h"

#include "cpu/simd_math.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
constexpr int64_t kBlock = 4096;  // elements summed in float32 before they join the float64 sum

float row_max(const float* x, int64_t n) {
  Vec top = set1(-__builtin_inff());
  float result = -__builtin_inff(), odd = 0;
  Vec nan = zero();  // x - x is 0 or, for NaN and infinities, NaN
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const Vec v = load(x + i);
    top = max(v, top);  // keeps top when v is NaN
    nan = nan + v * zero();
  }
  for (; i < n; i++) {
    if (x[i] > result) result = x[i];
    odd += x[i] * 0.f;
  }
  const float vector_max = reduce_max(top);
  if (vector_max > result) result = vector_max;
  odd += reduce_sum(nan);
  if (odd == odd) return result;
  // Infinities also end here: only a real NaN counts.
  for (i = 0; i < n; i++)
    if (x[i] != x[i]) return x[i];
  return result;
}

void divide(const float* x, float divisor, float* out, int64_t n) {
  const Vec d = set1(divisor);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i) / d);
  for (; i < n; i++) out[i] = x[i] / divisor;
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

}  // namespace

const SamplingKernels sampling_table = {row_max, divide, sum_exp, exponentials};

}  // namespace radix::cpu::RK_ISA
