// One token's keys or values to INT8, each head by its largest magnitude.
#include "cpu/kv_cache/kv_cache.h"
#include "cpu/simd.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;

// Calls fn(i, count...) over [0, n) a register at a time; `count` is given for the last, shorter one only.
template <class Fn>
inline void each(int64_t n, const Fn& fn) {
  int64_t i = 0;
  for (; i + W <= n; i += W) fn(i);
  if (i < n) fn(i, static_cast<int>(n - i));
}

template <class T>
void quantize_head(const T* x, int64_t n, int8_t* out, float* scale) {
  Vec top = zero();
  each(n, [&](int64_t i, auto... count) { top = max(top, abs(load(x + i, count...))); });
  *scale = reduce_max(top) / 127.f;
  if (*scale == 0) {
    std::memset(out, 0, static_cast<size_t>(n));
    return;
  }
  const Vec divisor = set1(*scale);
  for (int64_t i = 0; i < n; i += W) {
    const int count = static_cast<int>(n - i < W ? n - i : W);
    float lanes[W];
    store(lanes, round_nearest((count < W ? load(x + i, count) : load(x + i)) / divisor));
    for (int lane = 0; lane < count; lane++) out[i + lane] = static_cast<int8_t>(lanes[lane]);
  }
}

void quantize(const QuantizeTask& task, int64_t token, int64_t page, int64_t slot) {
  dispatch_float(task.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const char* rows = task.rows + token * task.row_stride;
    int8_t* cache = task.cache + page * task.page_stride + slot * task.slot_stride;
    float* scale = task.scale + page * task.scale_page_stride + slot * task.scale_slot_stride;
    for (int64_t h = 0; h < task.heads; h++)
      quantize_head(reinterpret_cast<const T*>(rows + h * task.row_head_stride), task.dim, cache + h * task.head_stride,
                    scale + h * task.scale_head_stride);
  });
}

}  // namespace

const KvCacheKernels kv_cache_table = {quantize};

}  // namespace radix::cpu::RK_ISA
