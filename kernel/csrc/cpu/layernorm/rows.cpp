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

// `count` numbers of a weight or bias from column i on, in its own type; `otherwise` where there is none.
template <class T>
Vec row_part(const RowTensor& row, int64_t i, int count, float otherwise) {
  const auto part = [&](const auto* data) { return count == W ? load(data + i) : load(data + i, count); };
  if (!row.data) return set1(otherwise);
  return row.dtype == DType::f32 ? part(static_cast<const float*>(row.data)) : part(static_cast<const T*>(row.data));
}

template <class T>
void normalize(const LayernormTask& task, const T* x, T* out) {
  const int64_t n = task.hidden;
  const float count = static_cast<float>(n);
  const Vec mean = set1(sum(x, n, [](Vec v, int) { return v; }) / count);
  const float variance = sum(x, n, [&](Vec v, int lanes) {
    const Vec d = v - mean, square = d * d;
    return lanes == W ? square : first_lanes(square, lanes);
  });
  const Vec scale = set1(1.f / __builtin_sqrtf(variance / count + task.eps));
  for (int64_t i = 0; i < n; i += W) {
    const int lanes = static_cast<int>(n - i < W ? n - i : W);
    const Vec v = lanes == W ? load(x + i) : load(x + i, lanes);
    const Vec y =
        fma((v - mean) * scale, row_part<T>(task.weight, i, lanes, 1.f), row_part<T>(task.bias, i, lanes, 0.f));
    lanes == W ? store(out + i, y) : store(out + i, y, lanes);
  }
}

void rows(const LayernormTask& task, int64_t begin, int64_t end) {
  dispatch_float(task.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    for (int64_t row = begin; row < end; row++) normalize(task, task.input.at<T>(row), task.out.at<T>(row));
  });
}

}  // namespace

const LayernormKernels layernorm_table = {rows};

}  // namespace radix::cpu::RK_ISA
