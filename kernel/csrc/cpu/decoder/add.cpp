// Sums of two tensors and products with a number, in float32. Bound by bytes.
#include "cpu/decoder/decoder.h"
#include "cpu/simd.h"

namespace radix::cpu::RK_ISA {
namespace {

void add(DType dtype, void* to, const void* x, int64_t begin, int64_t end) {
  constexpr int W = Vec::width;
  dispatch_float(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* sum = static_cast<T*>(to);
    const T* from = static_cast<const T*>(x);
    int64_t i = begin;
    for (; i + W <= end; i += W) store(sum + i, load(sum + i) + load(from + i));
    if (i < end) {
      const int tail = static_cast<int>(end - i);
      store(sum + i, load(sum + i, tail) + load(from + i, tail), tail);
    }
  });
}

void add_scaled(DType dtype, void* to, const void* x, float scale, int64_t n) {
  constexpr int W = Vec::width;
  const Vec factor = set1(scale);
  dispatch_float(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* sum = static_cast<T*>(to);
    const T* from = static_cast<const T*>(x);
    int64_t i = 0;
    for (; i + W <= n; i += W) store(sum + i, load(sum + i) + load(from + i) * factor);
    if (i < n) {
      const int tail = static_cast<int>(n - i);
      store(sum + i, load(sum + i, tail) + load(from + i, tail) * factor, tail);
    }
  });
}

void scale(DType dtype, void* x, float factor, int64_t n) {
  constexpr int W = Vec::width;
  const Vec by = set1(factor);
  dispatch_float(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* const values = static_cast<T*>(x);
    int64_t i = 0;
    for (; i + W <= n; i += W) store(values + i, load(values + i) * by);
    if (i < n) {
      const int tail = static_cast<int>(n - i);
      store(values + i, load(values + i, tail) * by, tail);
    }
  });
}

}  // namespace

const DecoderKernels decoder_table = {add, add_scaled, scale};

}  // namespace radix::cpu::RK_ISA
