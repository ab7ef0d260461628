// Rope family: checks once for every backend, then the backend's kernel.
#include "api/rope.h"

#include "common/check.h"

using namespace radix;

namespace {

constexpr int64_t kMaxRotaryDim = 1024;

// query or key: [T, heads * head_size] or [T, heads, head_size].
void check_heads(const Arg& x, int64_t tokens, int64_t head_size) {
  x.dtype(kFloats);
  if (x->ndim == 3) {
    x.shape({tokens, -1, head_size}, "positions, heads, head_size");
  } else {
    x.ndim(2).shape({tokens, -1}, "positions, heads * head_size");
    if (x.size(1) % head_size != 0)
      x.reject(RK_INVALID, "has shape %s, expected a multiple of head_size %ld in its last dimension",
               shape_text(*x).c_str(), static_cast<long>(head_size));
  }
  x.last_contiguous().writable();
}

}  // namespace

rk_status rk_apply_rope_inplace(const rk_apply_rope_inplace_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "apply_rope_inplace";
    const auto a = read_args(op, args);
    if (a.head_size < 1) fail(RK_INVALID, "%s: head_size is %d, expected at least 1", op, a.head_size);
    const Arg positions(op, "positions", a.positions), query(op, "query", a.query);
    const Arg cache(op, "cos_sin_cache", a.cos_sin_cache);
    query.backend_device();
    positions.same_device(query).dtype({DType::i32, DType::i64}).ndim(1);
    check_heads(query, positions.size(0), a.head_size);
    if (a.key) {
      const Arg key(op, "key", a.key);
      key.same_device(query).same_dtype(query);
      check_heads(key, positions.size(0), a.head_size);
    }
    cache.same_device(query).dtype({DType::f32}).ndim(2).last_contiguous();
    const int64_t rotary = cache.size(1);
    if (rotary % 2 != 0 || rotary < 2 || rotary > a.head_size || rotary > kMaxRotaryDim)
      cache.reject(RK_INVALID, "has shape %s, expected an even last dimension (rotary_dim) of at most %d (head_size)",
                   shape_text(*cache).c_str(), a.head_size < kMaxRotaryDim ? a.head_size : int(kMaxRotaryDim));
    backend::apply_rope_inplace(a, stream);
  });
}
