// RMSNorm, a row at a time. Bound by bytes: a row is read from memory once (the second pass finds it in L1/L2) and
// written once; the weight stays in cache. The sum of squares runs in four chains in one fixed order, so that a row's
// bits depend on nothing but the row.
#include "cpu/norm/norm.h"
#include "cpu/simd.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;

inline float scale_of(float sum_of_squares, int64_t hidden, float eps) {
  return 1.f / __builtin_sqrtf(sum_of_squares / static_cast<float>(hidden) + eps);
}

// What is normalized: a row, or the sum of two in float32.
template <class T>
struct Plain {
  const T* x;
  template <class... Count>
  Vec at(int64_t i, Count... count) const {
    return load(x + i, count...);
  }
};
template <class T>
struct Sum {
  const T *x, *residual;
  template <class... Count>
  Vec at(int64_t i, Count... count) const {
    return load(x + i, count...) + load(residual + i, count...);
  }
};

template <class Source>
float sum_of_squares(const Source& x, int64_t n) {
  Vec s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero();
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    const Vec a = x.at(i), b = x.at(i + W), c = x.at(i + 2 * W), d = x.at(i + 3 * W);
    s0 = fma(a, a, s0);
    s1 = fma(b, b, s1);
    s2 = fma(c, c, s2);
    s3 = fma(d, d, s3);
  }
  for (; i + W <= n; i += W) {
    const Vec a = x.at(i);
    s0 = fma(a, a, s0);
  }
  if (i < n) {
    const Vec a = x.at(i, static_cast<int>(n - i));
    s1 = fma(a, a, s1);
  }
  return reduce_sum(s0, s1, s2, s3);
}

// x may be out.
template <class T, class TW>
void scale_row(const T* x, const TW* weight, T* out, int64_t n, float scale) {
  const Vec r = set1(scale);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i) * r * load(weight + i));
  if (const int tail = static_cast<int>(n - i); tail > 0)
    store(out + i, load(x + i, tail) * r * load(weight + i, tail), tail);
}

// residual = x + residual; x = that sum, not rounded, times scale and weight.
template <class T, class TW>
void add_and_scale_row(T* x, T* residual, const TW* weight, int64_t n, float scale) {
  const Vec r = set1(scale);
  const Sum<T> sum{x, residual};
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const Vec s = sum.at(i);
    store(residual + i, s);
    store(x + i, s * r * load(weight + i));
  }
  if (const int tail = static_cast<int>(n - i); tail > 0) {
    const Vec s = sum.at(i, tail);
    store(residual + i, s, tail);
    store(x + i, s * r * load(weight + i, tail), tail);
  }
}

// Calls fn(Type<T>, Type<TW>) with the types of the rows and of the weight.
template <class Fn>
void dispatch(DType dtype, DType weight_dtype, const Fn& fn) {
  dispatch_float(dtype, [&](auto t) {
    if (weight_dtype == DType::f32) {
      fn(t, Type<float>{});
    } else {
      fn(t, t);
    }
  });
}

void rmsnorm(const RmsnormTask& task, int64_t begin, int64_t end) {
  dispatch(task.dtype, task.weight_dtype, [&](auto t, auto tw) {
    using T = typename decltype(t)::type;
    using TW = typename decltype(tw)::type;
    for (int64_t row = begin; row < end; row++) {
      const T* x = task.input.at<T>(row);
      const float scale = scale_of(sum_of_squares(Plain<T>{x}, task.hidden), task.hidden, task.eps);
      scale_row(x, static_cast<const TW*>(task.weight), task.out.at<T>(row), task.hidden, scale);
    }
  });
}

void fused_add_rmsnorm(const FusedAddRmsnormTask& task, int64_t begin, int64_t end) {
  dispatch(task.dtype, task.weight_dtype, [&](auto t, auto tw) {
    using T = typename decltype(t)::type;
    using TW = typename decltype(tw)::type;
    for (int64_t row = begin; row < end; row++) {
      T* x = task.input.at<T>(row);
      T* residual = task.residual.at<T>(row);
      const float scale = scale_of(sum_of_squares(Sum<T>{x, residual}, task.hidden), task.hidden, task.eps);
      add_and_scale_row(x, residual, static_cast<const TW*>(task.weight), task.hidden, scale);
    }
  });
}

}  // namespace

const NormKernels norm_table = {rmsnorm, fused_add_rmsnorm};

}  // namespace radix::cpu::RK_ISA
