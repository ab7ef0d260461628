// Attention family: checks once for every backend, then the backend's kernel.
#include "api/attention.h"

#include "api/cache_scale.h"
#include "common/tensor.h"

using namespace radix;

namespace {

constexpr int64_t kMaxHeadDim = 256;

void check_options(const char* op, const rk_attention_options& o) {
  if (o.window_left < -1) fail(RK_INVALID, "%s: window_size[0] is %d, expected -1 or more", op, o.window_left);
  if (o.window_right != -1 && o.window_right != 0)
    fail(RK_INVALID, "%s: window_size[1] is %d, expected -1 or 0", op, o.window_right);
  if (!(o.softcap >= 0)) fail(RK_INVALID, "%s: softcap is %g, expected 0 (off) or more", op, o.softcap);
}

void check_head_dim(const Arg& t) {
  const int64_t dim = t.size(-1);
  if (dim < 16 || dim % 16 != 0 || dim > kMaxHeadDim)
    t.reject(RK_UNSUPPORTED, "has head dimension %lld, supported are multiples of 16 up to %lld", (long long)dim,
             (long long)kMaxHeadDim);
}

// k and v: the last two dimensions are [Hkv, D] and [Hkv, Dv].
void check_qkv(const Arg& q, const Arg& k, const Arg& v) {
  q.backend_device().dtype({DType::bf16, DType::f16, DType::f32, DType::f8e4m3}).ndim(3).last_contiguous();
  k.same_device(q).last_contiguous();
  if (k.type() != DType::f8e4m3 && k.type() != DType::i8) k.same_dtype(q);
  v.same_device(q).same_dtype(k).ndim(k->ndim).last_contiguous();
  for (int i = 0; i + 1 < k->ndim; i++)
    if (v.size(i) != k.size(i))
      v.reject(RK_INVALID, "has shape %s, expected that of %s but for the last dimension, %s", shape_text(*v).c_str(),
               k.name(), shape_text(*k).c_str());
  const int64_t heads = q.size(1), kv_heads = k.size(-2), dim = q.size(2);
  check_head_dim(q);
  check_head_dim(v);
  if (k.size(-1) != dim)
    k.reject(RK_INVALID, "has head dimension %lld, expected %lld (head dimension of q)", (long long)k.size(-1),
             (long long)dim);
  if (kv_heads < 1 || heads % kv_heads != 0)
    k.reject(RK_INVALID, "has %lld heads, expected a divisor of q's %lld", (long long)kv_heads, (long long)heads);
}

// FP8 and INT8 tensors have scales, FP8 ones all of one size; no others have any.
template <class Args>
void check_scales(const char* op, const Arg& q, const Arg& k, const Args& args) {
  struct Scale {
    const char *name, *of;
    const rk_tensor* scale;
    bool wanted;
  };
  const bool int8 = k.type() == DType::i8, scaled = k.type() == DType::f8e4m3 || int8;
  if (int8 && q->device.type != RK_DEVICE_CPU) k.reject(RK_UNSUPPORTED, "is int8, which the CPU alone has kernels for");
  if (int8) q.dtype(kFloats);
  const Scale scales[] = {{"k_scale", "KV", args.k_scale, scaled},
                          {"v_scale", "KV", args.v_scale, scaled},
                          {"q_scale", "q", args.q_scale, q.type() == DType::f8e4m3}};
  for (const Scale& s : scales) {
    if (s.wanted && !s.scale) fail(RK_INVALID, "%s: %s is missing, FP8 and INT8 %s need it", op, s.name, s.of);
    if (!s.wanted && s.scale) fail(RK_INVALID, "%s: %s is given, but %s is neither FP8 nor INT8", op, s.name, s.of);
    if (!s.scale) continue;
    const Arg a(op, s.name, s.scale);
    check_cache_scale(a, k);
    if (int8) continue;
    a.contiguous();
    if (a.size(0) != args.k_scale->shape[0]) fail(RK_INVALID, "%s: %s and k_scale differ in size", op, s.name);
  }
}

// What the caller says about speed and space; `sizes` are those of the call.
void check_space(const char* op, const Arg& q, int64_t max_seqlen_q, const rk_tensor* workspace,
                 const rk_flash_attn_sizes& sizes) {
  if (max_seqlen_q < 0) fail(RK_INVALID, "%s: max_seqlen_q is %lld, expected 0 or more", op, (long long)max_seqlen_q);
  const int64_t need = backend::flash_attn_workspace_size(sizes);
  if (!workspace) {
    if (need > 0) fail(RK_INVALID, "%s: workspace is NULL, %lld bytes are needed", op, (long long)need);
    return;
  }
  const Arg a(op, "workspace", workspace);
  a.same_device(q).dtype({DType::u8}).ndim(1).contiguous().writable();
  if (a.size(0) < need)
    a.reject(RK_INVALID, "has %lld bytes, expected at least %lld", (long long)a.size(0), (long long)need);
  if (reinterpret_cast<uintptr_t>(data_ptr<char>(*a)) % 256 != 0 && need > 0)
    a.reject(RK_INVALID, "is not aligned to 256 bytes");
}

rk_flash_attn_sizes sizes_of(const Arg& q, const Arg& k, int64_t batch, int64_t max_pages, int64_t max_seqlen_q) {
  return {sizeof(rk_flash_attn_sizes),  q.size(0), batch,       q.size(1), k.size(-2), q.size(2),
          k->ndim == 4 ? k.size(1) : 0, max_pages, max_seqlen_q};
}

void check_outputs(const char* op, const Arg& q, const Arg& v, const rk_tensor* sinks, const Arg& out,
                   const rk_tensor* lse) {
  q.type() == DType::f8e4m3 ? out.dtype({DType::bf16, DType::f16}) : out.same_dtype(q);
  out.same_device(q).shape({q.size(0), q.size(1), v.size(-1)}, "tokens and heads of q, last dimension of v");
  out.last_contiguous().writable();
  if (sinks) {
    const Arg a(op, "sinks", sinks);
    a.same_device(q).dtype({DType::f32}).shape({q.size(1)}, "heads of q").contiguous();
  }
  if (lse) {
    const Arg a(op, "lse", lse);
    a.same_device(q).dtype({DType::f32}).shape({q.size(0), q.size(1)}, "tokens and heads of q").writable();
  }
}

}  // namespace

rk_status rk_flash_attn_with_kvcache(const rk_flash_attn_with_kvcache_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "flash_attn_with_kvcache";
    const auto a = read_args(op, args);
    const Arg q(op, "q", a.q), k(op, "k_cache", a.k_cache), v(op, "v_cache", a.v_cache), out(op, "out", a.out);
    const Arg table(op, "page_table", a.page_table), lens(op, "kv_lens", a.kv_lens),
        cu(op, "cu_seqlens_q", a.cu_seqlens_q);
    check_options(op, a.options);
    k.ndim(4);
    check_qkv(q, k, v);
    if (k.size(1) < 1) k.reject(RK_INVALID, "has page size 0");
    table.same_device(q).dtype({DType::i32}).ndim(2).last_contiguous();
    lens.same_device(q).dtype({DType::i32}).shape({table.size(0)}, "rows of page_table").contiguous();
    cu.same_device(q).dtype({DType::i32}).shape({table.size(0) + 1}, "rows of page_table, plus 1").contiguous();
    check_scales(op, q, k, a);
    check_outputs(op, q, v, a.sinks, out, a.lse);
    if (q.numel() == 0) return;
    check_space(op, q, a.max_seqlen_q, a.workspace, sizes_of(q, k, table.size(0), table.size(1), a.max_seqlen_q));
    backend::flash_attn_with_kvcache(a, stream);
  });
}

rk_status rk_flash_attn_varlen(const rk_flash_attn_varlen_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "flash_attn_varlen";
    const auto a = read_args(op, args);
    const Arg q(op, "q", a.q), k(op, "k", a.k), v(op, "v", a.v), out(op, "out", a.out);
    const Arg cu_q(op, "cu_seqlens_q", a.cu_seqlens_q), cu_k(op, "cu_seqlens_k", a.cu_seqlens_k);
    check_options(op, a.options);
    k.ndim(3);
    check_qkv(q, k, v);
    if (k.type() == DType::i8) k.reject(RK_DTYPE, "is int8: INT8 keys and values need a paged cache");
    check_scales(op, q, k, a);
    cu_q.same_device(q).dtype({DType::i32}).ndim(1).contiguous();
    if (cu_q.size(0) < 1) cu_q.reject(RK_INVALID, "is empty, expected [batch + 1]");
    cu_k.same_device(q).dtype({DType::i32}).same_shape(cu_q).contiguous();
    check_outputs(op, q, v, a.sinks, out, a.lse);
    if (q.numel() == 0) return;
    check_space(op, q, a.max_seqlen_q, a.workspace, sizes_of(q, k, cu_q.size(0) - 1, 0, a.max_seqlen_q));
    backend::flash_attn_varlen(a, stream);
  });
}

rk_status rk_flash_attn_workspace_size(const rk_flash_attn_sizes* sizes, int64_t* bytes) {
  return guard([&] { *bytes = backend::flash_attn_workspace_size(read_args("flash_attn_workspace_size", sizes)); });
}
