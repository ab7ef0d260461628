// KV cache family: checks once for every backend, then the backend's kernel.
#include "api/kv_cache.h"

#include "common/check.h"

using namespace radix;

namespace {

// Rows [T, H, D] against their cache [pages, page_size, H, D].
void check_pair(const Arg& rows, const Arg& cache) {
  rows.dtype(kFloats).ndim(3).last_contiguous();
  cache.same_device(rows).same_dtype(rows);
  cache.shape({-1, -1, rows.size(1), rows.size(2)}, "pages, page_size, then heads and head dimension of the rows");
  cache.last_contiguous().writable();
}

}  // namespace

rk_status rk_store_kv_cache(const rk_store_kv_cache_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "store_kv_cache";
    const auto a = read_args(op, args);
    const Arg k(op, "k", a.k), v(op, "v", a.v), slots(op, "slot_mapping", a.slot_mapping);
    const Arg k_cache(op, "k_cache", a.k_cache), v_cache(op, "v_cache", a.v_cache);
    k.backend_device();
    check_pair(k, k_cache);
    v.same_device(k).ndim(3).shape({k.size(0), k.size(1), -1}, "tokens and heads of k");
    check_pair(v, v_cache);
    v_cache.shape({k_cache.size(0), k_cache.size(1), -1, -1}, "pages and page_size of k_cache");
    slots.same_device(k).dtype({DType::i64}).shape({k.size(0)}, "tokens of k");
    backend::store_kv_cache(a, stream);
  });
}
