// The front of Hopper's attention: a checked call becomes Params, and the kernel that serves it is chosen.
#include "sm90/common/attention_params.cuh"

#include <algorithm>

#include "api/attention.h"
#include "common/tensor.h"

namespace radix {
namespace {

using attention::Params;
using attention::Shape;

// Rows of q, k, v and out are moved in pieces of 16 bytes.
void need_alignment(const char* op, const char* name, const rk_tensor& t) {
  bool even = reinterpret_cast<uintptr_t>(data_ptr<char>(t)) % 16 == 0;
  for (int i = 0; i + 1 < t.ndim; i++) even &= t.shape[i] == 1 || t.strides[i] * element_size(t) % 16 == 0;
  if (!even) fail(RK_UNSUPPORTED, "%s: %s is not aligned to 16 bytes; the Hopper kernels need that", op, name);
}

Shape shape_of(const rk_flash_attn_sizes& s) {
  Shape shape;
  shape.tokens = s.tokens;
  shape.batch = s.batch;
  shape.heads = static_cast<int>(s.heads);
  shape.kv_heads = static_cast<int>(s.kv_heads);
  shape.head_dim = shape.v_dim = static_cast<int>(s.head_dim);
  shape.page_size = static_cast<int>(s.page_size);
  shape.max_pages = s.max_pages;
  // Without a hint a batch with as many tokens as rows is taken for decode.
  const int64_t guess = s.tokens == s.batch ? 1 : s.tokens;
  shape.max_seqlen_q = s.max_seqlen_q > 0 ? std::min(s.max_seqlen_q, s.tokens) : guess;
  return shape;
}

template <class Args>
Params common_params(const char* op, const Args& a, const rk_tensor& k, const rk_tensor& v, int64_t batch) {
  const DType dtype = dtype_of(*a.out);
  if (dtype == DType::f32) fail(RK_UNSUPPORTED, "%s: the Hopper kernels have no float32", op);
  need_alignment(op, "q", *a.q);
  need_alignment(op, k.ndim == 4 ? "k_cache" : "k", k);
  need_alignment(op, v.ndim == 4 ? "v_cache" : "v", v);
  need_alignment(op, "out", *a.out);
  rk_flash_attn_sizes sizes{};
  sizes.tokens = a.q->shape[0];
  sizes.batch = batch;
  sizes.heads = a.q->shape[1];
  sizes.kv_heads = k.shape[k.ndim - 2];
  sizes.head_dim = a.q->shape[2];
  sizes.max_seqlen_q = a.max_seqlen_q;
  Params p;
  static_cast<Shape&>(p) = shape_of(sizes);
  p.dtype = dtype;
  p.q_dtype = dtype_of(*a.q);
  p.kv_dtype = dtype_of(k);
  p.v_dim = static_cast<int>(v.shape[v.ndim - 1]);
  p.q = data_ptr<void>(*a.q);
  p.k = data_ptr<void>(k);
  p.v = data_ptr<void>(v);
  p.out = data_ptr<void>(*a.out);
  p.q_token = a.q->strides[0], p.q_head = a.q->strides[1];
  p.out_token = a.out->strides[0], p.out_head = a.out->strides[1];
  p.k_token = k.strides[k.ndim - 3], p.k_head = k.strides[k.ndim - 2];
  p.v_token = v.strides[v.ndim - 3], p.v_head = v.strides[v.ndim - 2];
  if (a.lse) p.lse = data_ptr<float>(*a.lse), p.lse_token = a.lse->strides[0], p.lse_head = a.lse->strides[1];
  if (a.sinks) p.sinks = data_ptr<const float>(*a.sinks);
  p.cu_q = data_ptr<const int32_t>(*a.cu_seqlens_q);
  p.scale = a.options.softmax_scale;
  p.softcap = a.options.softcap;
  p.causal = a.options.causal != 0 || a.options.window_right == 0;
  p.window_left = a.options.window_left;
  if (a.q_scale) p.q_scale = data_ptr<const float>(*a.q_scale);
  if (a.k_scale) {
    p.k_scale = data_ptr<const float>(*a.k_scale);
    p.v_scale = data_ptr<const float>(*a.v_scale);
    p.scale_per_head = a.k_scale->shape[0] > 1;
  }
  if (a.workspace) p.workspace = data_ptr<void>(*a.workspace), p.workspace_size = a.workspace->shape[0];
  p.device = a.q->device;
  return p;
}

}  // namespace

namespace backend {

void flash_attn_with_kvcache(const rk_flash_attn_with_kvcache_args& a, rk_stream stream) {
  Params p = common_params("flash_attn_with_kvcache", a, *a.k_cache, *a.v_cache, a.page_table->shape[0]);
  p.any_split = a.any_split != 0;
  p.kv_pages = a.k_cache->shape[0];
  p.page_size = static_cast<int>(a.k_cache->shape[1]);
  p.k_page = a.k_cache->strides[0];
  p.v_page = a.v_cache->strides[0];
  p.page_table = data_ptr<const int32_t>(*a.page_table);
  p.max_pages = a.page_table->shape[1];
  p.table_row = a.page_table->strides[0];
  p.kv_lens = data_ptr<const int32_t>(*a.kv_lens);
  attention::decode_serves(p) ? run_decode(p, stream) : run_prefill(p, stream);
}

void flash_attn_varlen(const rk_flash_attn_varlen_args& a, rk_stream stream) {
  Params p = common_params("flash_attn_varlen", a, *a.k, *a.v, a.cu_seqlens_q->shape[0] - 1);
  p.kv_tokens = a.k->shape[0];
  p.cu_k = data_ptr<const int32_t>(*a.cu_seqlens_k);
  run_prefill(p, stream);
}

// Neither the dtypes nor the size of a value are among the sizes: enough for any.
int64_t flash_attn_workspace_size(const rk_flash_attn_sizes& sizes) {
  if (sizes.tokens < 1 || sizes.batch < 1 || sizes.kv_heads < 1) return 0;
  const Shape shape = shape_of(sizes);
  return std::max(attention::decode_workspace_size(shape), attention::prefill_workspace_size(shape));
}

}  // namespace backend
}  // namespace radix
