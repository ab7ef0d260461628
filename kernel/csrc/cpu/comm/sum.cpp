// Sums of a few segments of shared memory, in rank order. Bound by bytes.
#include "cpu/comm/sum.h"

#include "cpu/simd.h"

namespace radix::cpu::RK_ISA {
namespace {

template <class T>
void sum_floats(const void* const* parts, int count, void* out, int64_t n) {
  constexpr int W = Vec::width;
  const auto part = [&](int r) { return static_cast<const T*>(parts[r]); };
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    Vec total = load(part(0) + i);
    for (int r = 1; r < count; r++) total = total + load(part(r) + i);
    store(static_cast<T*>(out) + i, total);
  }
  if (const int tail = static_cast<int>(n - i); tail > 0) {
    Vec total = load(part(0) + i, tail);
    for (int r = 1; r < count; r++) total = total + load(part(r) + i, tail);
    store(static_cast<T*>(out) + i, total, tail);
  }
}

template <class T>
void sum_plain(const void* const* parts, int count, void* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    T total = static_cast<const T*>(parts[0])[i];
    for (int r = 1; r < count; r++) total += static_cast<const T*>(parts[r])[i];
    static_cast<T*>(out)[i] = total;
  }
}

void sum(DType dtype, const void* const* parts, int count, void* out, int64_t n) {
  switch (dtype) {
    case DType::i32: return sum_plain<uint32_t>(parts, count, out, n);
    case DType::i64: return sum_plain<uint64_t>(parts, count, out, n);
    case DType::f64: return sum_plain<double>(parts, count, out, n);
    default: dispatch_float(dtype, [&](auto type) { sum_floats<typename decltype(type)::type>(parts, count, out, n); });
  }
}

}  // namespace

const CommKernels comm_table = {sum};

}  // namespace radix::cpu::RK_ISA
