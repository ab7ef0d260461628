// KV cache family: checks once for every backend, then the backend's kernel.
#include "api/kv_cache.h"

#include "common/check.h"

using namespace radix;

namespace {

// Rows [T, H, D] against their cache [pages, page_size, H, D], and the scales of an INT8 cache.
void check_pair(const char* op, const Arg& rows, const Arg& cache, const char* scale_name, const rk_tensor* scale) {
  rows.dtype(kFloats).ndim(3).last_contiguous();
  cache.same_device(rows);
  if (cache.type() != DType::i8) cache.same_dtype(rows);
  cache.shape({-1, -1, rows.size(1), rows.size(2)}, "pages, page_size, then heads and head dimension of the rows");
  cache.last_contiguous().writable();
  const bool int8 = cache.type() == DType::i8;
  if (int8 && rows->device.type != RK_DEVICE_CPU)
    cache.reject(RK_UNSUPPORTED, "is int8, which the CPU alone has kernels for");
  if (int8 != (scale != nullptr))
    fail(RK_INVALID, "%s: %s %s", op, scale_name,
         scale ? "is given, but the cache is not INT8" : "is missing, an INT8 cache needs it");
  if (!scale) return;
  Arg(op, scale_name, scale)
      .same_device(rows)
      .dtype({DType::f32})
      .shape({cache.size(0), cache.size(1), cache.size(2)}, "pages, page_size and heads of the cache")
      .writable();
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
    if (k_cache.type() == DType::i8 || v_cache.type() == DType::i8) v_cache.same_dtype(k_cache);
    check_pair(op, v, v_cache, "v_scale", a.v_scale);
    v_cache.shape({k_cache.size(0), k_cache.size(1), -1, -1}, "pages and page_size of k_cache");
    slots.same_device(k).dtype({DType::i64}).shape({k.size(0)}, "tokens of k");
    backend::store_kv_cache(a, stream);
  });
}
