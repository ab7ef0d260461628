// The experts' products: checks once for every backend, then the backend's kernel.
#include "api/experts.h"

#include "common/tensor.h"

using namespace radix;

namespace {

constexpr int64_t kMaxExperts = 1024;

// Rows are moved in pieces of 16 bytes.
void need_alignment(const Arg& x) {
  bool even = reinterpret_cast<uintptr_t>(data_ptr<char>(*x)) % 16 == 0;
  for (int i = 0; i + 1 < x->ndim; i++) even &= x.size(i) == 1 || x.stride(i) * element_size(*x) % 16 == 0;
  if (!even) x.reject(RK_UNSUPPORTED, "has rows that are not aligned to 16 bytes");
}

void check_workspace(const char* op, const Arg& x, const rk_tensor* workspace, int64_t need) {
  const Arg a(op, "workspace", workspace);
  a.same_device(x).dtype({DType::u8}).ndim(1).contiguous().writable();
  if (a.size(0) < need)
    a.reject(RK_INVALID, "has %lld bytes, expected at least %lld", (long long)a.size(0), (long long)need);
  if (reinterpret_cast<uintptr_t>(data_ptr<char>(*a)) % 256 != 0) a.reject(RK_INVALID, "is not aligned to 256 bytes");
}

// One an expert, or one a block of 128 x 128 of each.
void check_scales(const char* op, const Arg& w1, const Arg& w2, const rk_tensor* s1, const rk_tensor* s2, bool fp8) {
  if (!fp8) {
    if (s1 || s2) w1.reject(RK_INVALID, "has scales, which go with float8_e4m3fn weights");
    return;
  }
  const Arg scale1(op, "w1_scale", s1), scale2(op, "w2_scale", s2);
  const bool blocks = scale1->ndim == 3;
  const auto check = [&](const Arg& w, const Arg& scale) {
    scale.same_device(w).dtype({DType::f32}).contiguous();
    if (blocks) {
      scale.shape({w.size(0), (w.size(1) + 127) / 128, (w.size(2) + 127) / 128}, "blocks of 128 x 128");
    } else {
      scale.shape({w.size(0)}, "one an expert");
    }
  };
  check(w1, scale1);
  check(w2, scale2);
}

}  // namespace

rk_status rk_fused_experts(const rk_fused_experts_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "fused_experts";
    const auto a = read_args(op, args);
    const Arg x(op, "hidden_states", a.hidden_states), w1(op, "w1", a.w1), w2(op, "w2", a.w2), out(op, "out", a.out);
    const Arg weights(op, "topk_weights", a.topk_weights), ids(op, "topk_ids", a.topk_ids);
    x.backend_device().dtype(kFloats).ndim(2).last_contiguous();
    if (x.type() == DType::f32) x.reject(RK_UNSUPPORTED, "is float32");
    const int64_t hidden = x.size(1);
    w1.same_device(x).ndim(3).contiguous();
    w2.same_device(x).ndim(3).contiguous();
    const bool fp8 = w1.type() == DType::f8e4m3;
    if (!fp8) w1.same_dtype(x);
    w2.same_dtype(w1);
    const int64_t experts = w1.size(0), inter = w2.size(2);
    w1.shape({-1, 2 * inter, hidden}, "experts, twice w2's last dimension, hidden size");
    w2.shape({experts, hidden, inter}, "experts of w1, hidden size");
    weights.same_device(x).dtype({DType::f32}).shape({x.size(0), -1}, "tokens of hidden_states").contiguous();
    ids.same_device(x).dtype({DType::i32}).same_shape(weights).contiguous();
    int64_t named = experts;
    if (a.expert_map) {
      const Arg map(op, "expert_map", a.expert_map);
      map.same_device(x).dtype({DType::i32}).ndim(1).contiguous();
      named = map.size(0);
      if (named > kMaxExperts) map.reject(RK_UNSUPPORTED, "names %ld experts, supported are %ld", named, kMaxExperts);
    }
    check_scales(op, w1, w2, a.w1_scale, a.w2_scale, fp8);
    out.same_device(x).same_dtype(x).same_shape(x).last_contiguous().writable();
    if (experts < 1 || experts > kMaxExperts)
      w1.reject(RK_UNSUPPORTED, "has %ld experts, supported are 1 to %ld", experts, kMaxExperts);
    const int64_t unit = fp8 ? 16 : 8;
    if (hidden % unit != 0 || inter % unit != 0 || inter == 0)
      w2.reject(RK_UNSUPPORTED, "has sizes %ld and %ld, supported are multiples of %ld", hidden, inter, unit);
    for (const Arg* t : {&x, &w1, &w2, &out}) need_alignment(*t);
    if (ids.numel() == 0 && out.numel() > 0) ids.reject(RK_UNSUPPORTED, "has no columns");
    if (out.numel() == 0) return;
    const rk_fused_experts_sizes sizes = {sizeof sizes, x.size(0), ids.size(1), named, hidden, inter};
    check_workspace(op, x, a.workspace, backend::fused_experts_workspace_size(sizes));
    backend::fused_experts(a, stream);
  });
}

rk_status rk_fused_experts_workspace_size(const rk_fused_experts_sizes* sizes, int64_t* bytes) {
  return guard(
      [&] { *bytes = backend::fused_experts_workspace_size(read_args("fused_experts_workspace_size", sizes)); });
}
