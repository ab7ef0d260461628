// Fused rope family: checks once for every backend, then the backend's kernel.
#include "api/fused_rope.h"

#include "api/cache_scale.h"
#include "common/check.h"

using namespace radix;

namespace {

constexpr int64_t kMaxHeadDim = 256;

void check_weight(const Arg& q, const Arg& weight) {
  weight.same_device(q).dtype({q.type(), DType::f32}).shape({q.size(2)}, "head dimension of q").contiguous();
}

void check_cache(const char* op, const Arg& k, const Arg& cache, const char* scale_name, const rk_tensor* scale) {
  cache.shape({-1, -1, k.size(1), k.size(2)}, "pages, page_size, then heads and head dimension of k");
  check_stored_cache(op, k, cache, scale_name, scale);
}

}  // namespace

rk_status rk_fused_qk_norm_rope_store(const rk_fused_qk_norm_rope_store_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "fused_qk_norm_rope_store";
    const auto a = read_args(op, args);
    const Arg q(op, "q", a.q), k(op, "k", a.k), v(op, "v", a.v), table(op, "cos_sin_cache", a.cos_sin_cache);
    const Arg positions(op, "positions", a.positions), slots(op, "slot_mapping", a.slot_mapping);
    const Arg k_cache(op, "k_cache", a.k_cache), v_cache(op, "v_cache", a.v_cache);
    q.backend_device().dtype(kFloats).ndim(3).last_contiguous().writable();
    if (q.size(2) % 2 != 0 || q.size(2) < 2 || q.size(2) > kMaxHeadDim)
      q.reject(RK_UNSUPPORTED, "has head dimension %ld, supported are even numbers up to %ld", q.size(2), kMaxHeadDim);
    k.same_device(q).same_dtype(q).ndim(3).shape({q.size(0), -1, q.size(2)}, "tokens and head dimension of q");
    v.same_device(q).same_dtype(q).same_shape(k).last_contiguous();
    k.last_contiguous();
    if (!a.q_weight != !a.k_weight) fail(RK_INVALID, "%s: q_weight and k_weight go together", op);
    if (a.q_weight) {
      const Arg q_weight(op, "q_weight", a.q_weight), k_weight(op, "k_weight", a.k_weight);
      check_weight(q, q_weight);
      check_weight(q, k_weight);
      k_weight.same_dtype(q_weight);
    }
    table.same_device(q).dtype({DType::f32}).ndim(2).last_contiguous();
    const int64_t rotary = table.size(1);
    if (rotary % 2 != 0 || rotary < 2 || rotary > q.size(2))
      table.reject(RK_INVALID, "has shape %s, expected an even last dimension (rotary_dim) of at most %ld",
                   shape_text(*table).c_str(), q.size(2));
    positions.same_device(q).dtype({DType::i32, DType::i64}).shape({q.size(0)}, "tokens of q");
    slots.same_device(q).dtype({DType::i64}).shape({q.size(0)}, "tokens of q");
    check_cache(op, k, k_cache, "k_scale", a.k_scale);
    check_cache(op, v, v_cache, "v_scale", a.v_scale);
    v_cache.same_dtype(k_cache);
    v_cache.shape({k_cache.size(0), k_cache.size(1), -1, -1}, "pages and page_size of k_cache");
    if (q.size(0) > 0) backend::fused_qk_norm_rope_store(a, stream);
  });
}
