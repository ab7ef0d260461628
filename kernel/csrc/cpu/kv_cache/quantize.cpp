// One token's keys or values to INT8, each head by its largest magnitude.
#include "cpu/kv_cache/kv_cache.h"
#include "cpu/kv_cache/quantize_head.h"

namespace radix::cpu::RK_ISA {
namespace {

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
