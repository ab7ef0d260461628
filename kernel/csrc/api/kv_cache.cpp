// KV cache family: checks once for every backend, then the backend's kernel.
#include "api/kv_cache.h"

#include "api/cache_scale.h"
#include "common/check.h"

using namespace radix;

namespace {

bool is_fp8(DType type) {
  return type == DType::f8e4m3 || type == DType::f8e4m3fnuz;
}

// Rows [T, H, D] against their cache [pages, page_size, H, D], and the scales of an INT8 or FP8 cache.
void check_pair(const char* op, const Arg& rows, const Arg& cache, const char* scale_name, const rk_tensor* scale) {
  rows.dtype(kFloats).ndim(3).last_contiguous();
  cache.shape({-1, -1, rows.size(1), rows.size(2)}, "pages, page_size, then heads and head dimension of the rows");
  check_stored_cache(op, rows, cache, scale_name, scale);
}

}  // namespace

rk_status rk_store_kv_cache(const rk_store_kv_cache_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "store_kv_cache";
    const auto a = read_args(op, args);
    const Arg k(op, "k", a.k), v(op, "v", a.v), slots(op, "slot_mapping", a.slot_mapping);
    const Arg k_cache(op, "k_cache", a.k_cache), v_cache(op, "v_cache", a.v_cache);
    k.backend_device();
    check_pair(op, k, k_cache, "k_scale", a.k_scale);
    v.same_device(k).ndim(3).shape({k.size(0), k.size(1), -1}, "tokens and heads of k");
    const auto scaled = [](const Arg& cache) { return cache.type() == DType::i8 || is_fp8(cache.type()); };
    if (scaled(k_cache) || scaled(v_cache)) v_cache.same_dtype(k_cache);
    check_pair(op, v, v_cache, "v_scale", a.v_scale);
    v_cache.shape({k_cache.size(0), k_cache.size(1), -1, -1}, "pages and page_size of k_cache");
    slots.same_device(k).dtype({DType::i64}).shape({k.size(0)}, "tokens of k");
    backend::store_kv_cache(a, stream);
  });
}
