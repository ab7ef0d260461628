// Layer normalisation, a row at a time. Bound by bytes: a row is read from memory once (the second and third pass find
// it in L1/L2) and written once. Both sums run in four chains in one fixed order, so that a row's bits depend on
// nothing but the row.
#include "cpu/layernorm/layernorm.h"
#include "cpu/simd.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;

// Sum of fn(register) over a row; fn(register, count) for the last, shorter one, whose other lanes must stay 0.
template <class T, class Fn>
float sum(const T* x, int64_t n, const Fn& fn) {
  Vec chain[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int c = 0; c < 4; c++) chain[c] = chain[c] + fn(load(x + i + c * W), W);
  for (; i + W <= n; i += W) chain[0] = chain[0] + fn(load(x + i), W);
  if (const int tail = static_cast<int>(n - i); tail > 0) chain[1] = chain[1] + fn(load(x + i, tail), tail);
  return reduce_sum(chain[0], chain[1], chain[2], chain[3]);
}

inline Vec first_lanes(Vec x, int count) {
  float lanes[W];
  store(lanes, x);
  return load(lanes, count);
}

// weight or bias NULL: 1 or 0.
template <class T, class TW, class TB>
void normalize(const T* x, const TW* weight, const TB* bias, T* out, int64_t n, float eps) {
  const float count = static_cast<float>(n);
  const Vec mean = set1(sum(x, n, [](Vec v, int) { return v; }) / count);
  const float variance = sum(x, n, [&](Vec v, int lanes) {
    const Vec d = v - mean, square = d * d;
    return lanes == W ? square : first_lanes(square, lanes);
  });
  const Vec scale = set1(1.f / __builtin_sqrtf(variance / count + eps));
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const Vec w = weight ? load(weight + i) : set1(1.f), b = bias ? load(bias + i) : zero();
    store(out + i, fma((load(x + i) - mean) * scale, w, b));
  }
  if (const int tail = static_cast<int>(n - i); tail > 0) {
    const Vec w = weight ? load(weight + i, tail) : set1(1.f), b = bias ? load(bias + i, tail) : zero();
    store(out + i, fma((load(x + i, tail) - mean) * scale, w, b), tail);
  }
}

// Calls fn with the numbers of a weight or bias, which are the row's type T or float.
template <class T, class Fn>
void with_numbers(const RowTensor& row, const Fn& fn) {
  row.dtype == DType::f32 ? fn(static_cast<const float*>(row.data)) : fn(static_cast<const T*>(row.data));
}

void rows(const LayernormTask& task, int64_t begin, int64_t end) {
  dispatch_float(task.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    with_numbers<T>(task.weight, [&](const auto* weight) {
      with_numbers<T>(task.bias, [&](const auto* bias) {
        for (int64_t row = begin; row < end; row++)
          normalize(task.input.at<T>(row), weight, bias, task.out.at<T>(row), task.hidden, task.eps);
      });
    });
  });
}

}  // namespace

const LayernormKernels layernorm_table = {rows};

}  // namespace radix::cpu::RK_ISA
