// The experts' products: checks once for every backend, then the backend's kernel.
#include "api/experts.h"

#include "common/tensor.h"
#include "radix_kernels/linear.h"

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

// One an expert, or one a block of 128 x 128 of each; need_blocks: the latter alone.
void check_scales(const char* op, const Arg& w1, const Arg& w2, const rk_tensor* s1, const rk_tensor* s2, bool fp8,
                  bool need_blocks) {
  if (!fp8) {
    if (need_blocks) w1.reject(RK_INVALID, "is not float8_e4m3fn, as use_fp8_w8a8 needs it");
    if (s1 || s2) w1.reject(RK_INVALID, "has scales, which go with float8_e4m3fn weights");
    return;
  }
  const Arg scale1(op, "w1_scale", s1), scale2(op, "w2_scale", s2);
  const bool blocks = scale1->ndim == 3;
  if (need_blocks && !blocks) scale1.reject(RK_INVALID, "has no scale for a block, as use_fp8_w8a8 needs it");
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

// weights and ids [tokens, k], and how many experts they may name.
int64_t check_routing(const char* op, const Arg& x, const rk_tensor* topk_weights, const rk_tensor* topk_ids,
                      const rk_tensor* expert_map, int64_t experts) {
  const Arg weights(op, "topk_weights", topk_weights), ids(op, "topk_ids", topk_ids);
  weights.same_device(x).dtype({DType::f32}).shape({x.size(0), -1}, "tokens of hidden_states").contiguous();
  ids.same_device(x).dtype({DType::i32}).same_shape(weights).contiguous();
  if (!expert_map) return experts;
  const Arg map(op, "expert_map", expert_map);
  map.same_device(x).dtype({DType::i32}).ndim(1).contiguous();
  if (map.size(0) > kMaxExperts)
    map.reject(RK_UNSUPPORTED, "names %ld experts, supported are %ld", map.size(0), kMaxExperts);
  return map.size(0);
}

// What the codes of packed experts may be.
void check_mixed_kind(const char* op, const rk_fused_experts_mixed_args& a) {
  const DType scale = dtype_of(a.scale_dtype);
  if (a.kind == RK_WEIGHT_MXFP4) {
    if (a.group != 32 || a.zeros || scale != DType::u8)
      fail(RK_INVALID, "%s: MXFP4 weights have groups of 32, scales in uint8 and no zero points", op);
    return;
  }
  const bool int8 = a.kind == RK_WEIGHT_INT8;
  if (!int8 && a.kind != RK_WEIGHT_INT4)
    fail(RK_UNSUPPORTED, "%s: kind is %u, supported are INT4, INT8 and MXFP4", op, a.kind);
  if (a.zeros && int8) fail(RK_INVALID, "%s: zero points are for INT4, this weight has none", op);
  const bool wide = a.group == 0 || a.group == 128;
  if (!wide && (int8 || (a.group != 32 && a.group != 64)))
    fail(RK_UNSUPPORTED, "%s: group is %u, supported are %s128 and 0, whole rows", op, a.group, int8 ? "" : "32, 64, ");
  if (scale != DType::bf16 && scale != DType::f16 && scale != DType::f32)
    fail(RK_DTYPE, "%s: scales have a dtype that is none of bfloat16, float16 and float32", op);
}

// w [E, bytes], each a packed weight [n, k].
void check_mixed_weight(const char* op, const char* name, const rk_fused_experts_mixed_args& a, const rk_tensor* given,
                        const Arg& x, int64_t experts, int64_t n, int64_t k) {
  const Arg w(op, name, given);
  w.same_device(x).dtype({DType::u8}).last_contiguous();
  w.shape({experts, backend::mixed_weight_bytes(a, n, k)}, "experts, bytes of a packed weight");
  need_alignment(w);
}

void check_mixed_bias(const char* op, const char* name, const rk_tensor* given, const Arg& x, int64_t experts,
                      int64_t rows) {
  if (!given) return;
  const Arg bias(op, name, given);
  bias.same_device(x).dtype({x.type(), DType::f32}).shape({experts, rows}, "experts, rows of the weight").contiguous();
}

}  // namespace

rk_status rk_fused_experts(const rk_fused_experts_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "fused_experts";
    const auto a = read_args(op, args);
    const Arg x(op, "hidden_states", a.hidden_states), w1(op, "w1", a.w1), w2(op, "w2", a.w2), out(op, "out", a.out);
    const Arg ids(op, "topk_ids", a.topk_ids);
    x.backend_device().dtype(kFloats).ndim(2).last_contiguous();
    if (x.type() == DType::f32) x.reject(RK_UNSUPPORTED, "is float32");
    const int64_t hidden = x.size(1);
    w1.same_device(x).ndim(3).contiguous();
    w2.same_device(x).ndim(3).contiguous();
    const bool fp8 = w1.type() == DType::f8e4m3;
    if (w1.type() == DType::f8e4m3fnuz) w1.reject(RK_UNSUPPORTED, "is float8_e4m3fnuz");
    if (!fp8) w1.same_dtype(x);
    w2.same_dtype(w1);
    const int64_t experts = w1.size(0), inter = w2.size(2);
    w1.shape({-1, 2 * inter, hidden}, "experts, twice w2's last dimension, hidden size");
    w2.shape({experts, hidden, inter}, "experts of w1, hidden size");
    const int64_t named = check_routing(op, x, a.topk_weights, a.topk_ids, a.expert_map, experts);
    const bool quantized = a.use_fp8_w8a8 != 0;
    check_scales(op, w1, w2, a.w1_scale, a.w2_scale, fp8, quantized);
    out.same_device(x).same_dtype(x).same_shape(x).last_contiguous().writable();
    if (experts < 1 || experts > kMaxExperts)
      w1.reject(RK_UNSUPPORTED, "has %ld experts, supported are 1 to %ld", experts, kMaxExperts);
    const int64_t unit = quantized ? 128 : fp8 ? 16 : 8;
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

rk_status rk_fused_experts_mixed(const rk_fused_experts_mixed_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "fused_experts_mixed";
    const auto a = read_args(op, args);
    const Arg x(op, "hidden_states", a.hidden_states), w1(op, "w1", a.w1), out(op, "out", a.out);
    const Arg ids(op, "topk_ids", a.topk_ids);
    x.backend_device().dtype(kFloats).ndim(2).last_contiguous();
    if (x.type() == DType::f32) x.reject(RK_UNSUPPORTED, "is float32");
    check_mixed_kind(op, a);
    const int64_t hidden = x.size(1), inter = a.inter_size, experts = w1.ndim(2).size(0);
    if (experts < 1 || experts > kMaxExperts)
      w1.reject(RK_UNSUPPORTED, "has %ld experts, supported are 1 to %ld", experts, kMaxExperts);
    if (hidden % 8 != 0 || inter % 16 != 0 || inter < 1 || hidden < 1)
      w1.reject(RK_UNSUPPORTED, "is of sizes %ld and %ld, supported are multiples of 8 and of 16", hidden, inter);
    check_mixed_weight(op, "w1", a, a.w1, x, experts, 2 * inter, hidden);
    check_mixed_weight(op, "w2", a, a.w2, x, experts, hidden, inter);
    check_mixed_bias(op, "bias1", a.bias1, x, experts, 2 * inter);
    check_mixed_bias(op, "bias2", a.bias2, x, experts, hidden);
    const int64_t named = check_routing(op, x, a.topk_weights, a.topk_ids, a.expert_map, experts);
    if (a.activation != RK_ACTIVATION_SILU && a.activation != RK_ACTIVATION_SWIGLU_CLAMPED)
      fail(RK_UNSUPPORTED, "%s: activation is %d, supported are SiLU and the clamped SwiGLU", op, a.activation);
    if (a.activation == RK_ACTIVATION_SWIGLU_CLAMPED && !(a.limit > 0))
      fail(RK_INVALID, "%s: limit is %g, expected a number above 0", op, a.limit);
    out.same_device(x).same_dtype(x).same_shape(x).last_contiguous().writable();
    for (const Arg* t : {&x, &out}) need_alignment(*t);
    if (ids.numel() == 0 && out.numel() > 0) ids.reject(RK_UNSUPPORTED, "has no columns");
    if (out.numel() == 0) return;
    const rk_fused_experts_sizes sizes = {sizeof sizes, x.size(0), ids.size(1), named, hidden, inter};
    check_workspace(op, x, a.workspace, backend::fused_experts_workspace_size(sizes));
    backend::fused_experts_mixed(a, stream);
  });
}

rk_status rk_m_grouped_gemm(const rk_m_grouped_gemm_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "m_grouped_gemm";
    const auto a = read_args(op, args);
    const Arg x(op, "x", a.x), weight(op, "weight", a.weight), groups(op, "groups", a.groups), out(op, "out", a.out);
    x.backend_device().last_contiguous();
    const bool masked = x->ndim == 3, fp8 = x.type() == DType::f8e4m3;
    if (!masked) x.ndim(2);
    if (x.type() == DType::f8e4m3fnuz) x.reject(RK_UNSUPPORTED, "is float8_e4m3fnuz");
    if (!fp8) x.dtype(kFloats);
    if (x.type() == DType::f32) x.reject(RK_UNSUPPORTED, "is float32");
    weight.same_device(x).same_dtype(x).ndim(3).contiguous();
    const int64_t experts = weight.size(0), n = weight.size(1), k = weight.size(2);
    const int64_t lead = x.size(0), rows = masked ? lead * x.size(1) : lead, blocks = (k + 127) / 128;
    masked ? x.shape({experts, -1, k}, "groups and rows of weight") : x.shape({-1, k}, "rows of weight");
    groups.same_device(x).dtype({DType::i32}).shape({lead}, "groups, or rows of x").contiguous();
    out.same_device(x).last_contiguous().writable();
    masked ? out.shape({experts, x.size(1), n}, "rows of x, rows of weight") : out.shape({lead, n}, "the same");
    if (fp8) {
      const Arg x_scale(op, "x_scale", a.x_scale), w_scale(op, "weight_scale", a.weight_scale);
      out.dtype({DType::bf16});
      x_scale.same_device(x).dtype({DType::f32}).contiguous();
      masked ? x_scale.shape({experts, x.size(1), blocks}, "blocks of 128") : x_scale.shape({lead, blocks}, "the same");
      w_scale.same_device(x).dtype({DType::f32}).shape({experts, (n + 127) / 128, blocks}, "blocks").contiguous();
    } else {
      out.same_dtype(x);
      if (a.x_scale || a.weight_scale) x.reject(RK_INVALID, "has scales, which go with float8_e4m3fn");
    }
    if (experts > kMaxExperts) weight.reject(RK_UNSUPPORTED, "has %ld groups, supported are %ld", experts, kMaxExperts);
    if (n % 8 != 0 || k % (fp8 ? 16 : 8) != 0 || k == 0)
      weight.reject(RK_UNSUPPORTED, "has rows and columns %ld and %ld, supported are multiples of 8 (FP8: 16)", n, k);
    if (rows > INT32_MAX) x.reject(RK_UNSUPPORTED, "has %ld rows", rows);
    for (const Arg* t : {&x, &weight, &out}) need_alignment(*t);
    if (masked)
      for (const Arg* t : {&x, &out})
        if (t->size(0) > 1 && t->stride(0) != t->size(1) * t->stride(1))
          t->reject(RK_UNSUPPORTED, "has groups that do not follow each other");
    if (rows == 0 || n == 0 || experts == 0) return;
    const rk_m_grouped_gemm_sizes sizes = {sizeof sizes, fp8, rows, experts, k};
    check_workspace(op, x, a.workspace, backend::m_grouped_gemm_workspace_size(sizes));
    backend::m_grouped_gemm(a, stream);
  });
}

rk_status rk_m_grouped_gemm_workspace_size(const rk_m_grouped_gemm_sizes* sizes, int64_t* bytes) {
  return guard(
      [&] { *bytes = backend::m_grouped_gemm_workspace_size(read_args("m_grouped_gemm_workspace_size", sizes)); });
}
