// CPU kv_cache family: what store.cpp hands to the kernels of an ISA level.
#pragma once

#include "common/tensor.h"
#include "cpu/isa.h"

namespace radix::cpu {

// Rows [T, heads, dim] by byte strides; an INT8 cache [pages, page_size, heads, dim] and its scales [pages, page_size,
// heads] by strides in elements.
struct QuantizeTask {
  const char* rows;
  int64_t row_stride, row_head_stride;
  int8_t* cache;
  int64_t page_stride, slot_stride, head_stride;
  float* scale;
  int64_t scale_page_stride, scale_slot_stride, scale_head_stride;
  int64_t heads, dim;
  DType dtype;
};

struct KvCacheKernels {
  // Row `token` to slot `slot` of page `page`.
  void (*quantize)(const QuantizeTask& task, int64_t token, int64_t page, int64_t slot);
};
RK_CPU_TABLE(KvCacheKernels, kv_cache)

}  // namespace radix::cpu
