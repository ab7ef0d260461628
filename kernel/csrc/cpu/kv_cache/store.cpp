// KV store on the CPU. Bits are copied, so one version serves every ISA level (memcpy picks its own), or quantized by
// quantize.cpp. Bound by bytes.
#include "api/kv_cache.h"
#include "common/tensor.h"
#include "cpu/kv_cache/kv_cache.h"
#include "cpu/thread_pool.h"

namespace radix::backend {
namespace {

constexpr int64_t kGrainBytes = 32 * 1024;

// Rows [T, H, D] and their cache [pages, page_size, H, D]; strides in bytes. Heads that lie side by side in both are
// copied as one.
struct Copy {
  const char* rows;
  char* cache;
  int64_t token_stride, row_head_stride, page_stride, slot_stride, cache_head_stride;
  int64_t heads, bytes;

  Copy(const rk_tensor& r, const rk_tensor& c) : rows(data_ptr<char>(r)), cache(data_ptr<char>(c)) {
    const int64_t item = element_size(r);
    token_stride = r.strides[0] * item;
    row_head_stride = r.strides[1] * item;
    page_stride = c.strides[0] * item;
    slot_stride = c.strides[1] * item;
    cache_head_stride = c.strides[2] * item;
    heads = r.shape[1];
    bytes = r.shape[2] * item;
    if (row_head_stride == bytes && cache_head_stride == bytes) {
      bytes *= heads;
      heads = heads > 0 ? 1 : 0;
    }
  }

  void run(int64_t token, int64_t page, int64_t offset) const {
    const char* from = rows + token * token_stride;
    char* to = cache + page * page_stride + offset * slot_stride;
    for (int64_t h = 0; h < heads; h++)
      std::memcpy(to + h * cache_head_stride, from + h * row_head_stride, static_cast<size_t>(bytes));
  }
};

cpu::QuantizeTask quantize_task(const rk_tensor& rows, const rk_tensor& cache, const rk_tensor& scale) {
  const int64_t item = element_size(rows);
  return {data_ptr<char>(rows), rows.strides[0] * item, rows.strides[1] * item, data_ptr<int8_t>(cache),
          cache.strides[0],     cache.strides[1],       cache.strides[2],       data_ptr<float>(scale),
          scale.strides[0],     scale.strides[1],       scale.strides[2],       rows.shape[1],
          rows.shape[2],        dtype_of(rows)};
}

void check_slots(const Indices& slots, int64_t limit) {
  for (int64_t t = 0; t < slots.count(); t++)
    if (slots[t] < -1 || slots[t] >= limit)
      fail(RK_INVALID, "store_kv_cache: slot_mapping[%ld] is %ld, expected -1 to %ld (slots of the cache)", t, slots[t],
           limit - 1);
}

}  // namespace

void store_kv_cache(const rk_store_kv_cache_args& args, rk_stream) {
  const Indices slots(*args.slot_mapping);
  const int64_t page_size = args.k_cache->shape[1];
  check_slots(slots, args.k_cache->shape[0] * page_size);
  if (args.k_scale) {
    const cpu::QuantizeTask k = quantize_task(*args.k, *args.k_cache, *args.k_scale);
    const cpu::QuantizeTask v = quantize_task(*args.v, *args.v_cache, *args.v_scale);
    const auto kernel = cpu::kv_cache_kernels().quantize;
    cpu::parallel_for(slots.count(), 1 + kGrainBytes / (1 + 4 * k.heads * (k.dim + v.dim)),
                      [&](int64_t begin, int64_t end) {
                        for (int64_t t = begin; t < end; t++) {
                          if (slots[t] < 0) continue;
                          kernel(k, t, slots[t] / page_size, slots[t] % page_size);
                          kernel(v, t, slots[t] / page_size, slots[t] % page_size);
                        }
                      });
    return;
  }
  const Copy k(*args.k, *args.k_cache), v(*args.v, *args.v_cache);
  const int64_t bytes = 1 + k.heads * k.bytes + v.heads * v.bytes;
  cpu::parallel_for(slots.count(), 1 + kGrainBytes / bytes, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      if (slots[t] < 0) continue;
      k.run(t, slots[t] / page_size, slots[t] % page_size);
      v.run(t, slots[t] / page_size, slots[t] % page_size);
    }
  });
}

}  // namespace radix::backend
