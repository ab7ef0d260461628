/* Attention of ragged queries over a paged or a ragged KV, and the merge of partial results. */
#ifndef RADIX_KERNELS_ATTENTION_H
#define RADIX_KERNELS_ATTENTION_H

#include "radix_kernels/types.h"

/* What both attention entries share. The q tokens of a row are the last of its kv tokens. window_left: earlier tokens
 * seen besides the token at the query's own position, -1 all; window_right -1, or 0 (the same as causal). softcap above
 * 0: scores become softcap * tanh(score / softcap). A query that sees nothing gets out 0 and lse -inf (with sinks: the
 * sink). A row's bits depend on neither the other rows of the batch nor the number of threads: on the CPU the KV is cut
 * at multiples of 512 tokens and the parts are combined in order. On a GPU they may depend on the number of rows,
 * unless any_split is 0 (the paged entry). */
typedef struct rk_attention_options {
  float softmax_scale;
  float softcap;
  int32_t causal;
  int32_t window_left;
  int32_t window_right;
} rk_attention_options;

/* q, out [T, Hq, D]; k_cache, v_cache [pages, page_size, Hkv, D], one dtype (bf16, fp16, fp32), last dim contiguous.
 * page_table int32 [B, max_pages], kv_lens int32 [B] (new tokens included), cu_seqlens_q int32 [B + 1] from 0 to T.
 * Optional: sinks float32 [Hq], lse float32 [T, Hq] (natural log, sinks included).
 * v_cache and out may have a last dimension Dv of their own. FP8: the caches may be float8_e4m3fn, one value stands for
 * value * scale, with k_scale and v_scale float32 [1] or [Hkv]; then q may be float8_e4m3fn too, with a q_scale of the
 * same size (a KV head's query heads share one), and out is bf16 or fp16. INT8 KV (CPU): the caches are int8, the
 * scales float32 [pages, page_size, Hkv], any strides. Hq a multiple of Hkv; D and Dv multiples of 16 up to 256.
 * Entries of page_table past ceil(kv_len / page_size) and slots past kv_len are never used; on the CPU a page id that
 * is read and out of range is RK_INVALID. max_seqlen_q: the most query tokens that a row has, 0 unknown. A hint: it
 * chooses the kernel, never the meaning. any_split: 0: a row's sum is split at positions that follow from its own
 * length alone; 1: in a small batch a GPU may split short rows finer, which is faster. workspace: uint8, contiguous,
 * 256-byte aligned, at least rk_flash_attn_workspace_size() of the same sizes; may be NULL where that is 0.
 * RK_UNSUPPORTED before anything is launched when no kernel serves the call. */
typedef struct rk_flash_attn_with_kvcache_args {
  uint32_t struct_size;
  rk_attention_options options;
  const rk_tensor* q;
  const rk_tensor* k_cache;
  const rk_tensor* v_cache;
  const rk_tensor* page_table;
  const rk_tensor* kv_lens;
  const rk_tensor* cu_seqlens_q;
  const rk_tensor* sinks;
  const rk_tensor* out;
  const rk_tensor* lse;
  const rk_tensor* k_scale;
  const rk_tensor* v_scale;
  const rk_tensor* workspace;
  int64_t max_seqlen_q;
  const rk_tensor* q_scale;
  int64_t any_split;
} rk_flash_attn_with_kvcache_args;
RK_API rk_status rk_flash_attn_with_kvcache(const rk_flash_attn_with_kvcache_args* args, rk_stream stream);

/* The same over k [Tk, Hkv, D] and v [Tk, Hkv, Dv] with cu_seqlens_k int32 [B + 1] from 0 to Tk. */
typedef struct rk_flash_attn_varlen_args {
  uint32_t struct_size;
  rk_attention_options options;
  const rk_tensor* q;
  const rk_tensor* k;
  const rk_tensor* v;
  const rk_tensor* cu_seqlens_q;
  const rk_tensor* cu_seqlens_k;
  const rk_tensor* sinks;
  const rk_tensor* out;
  const rk_tensor* lse;
  const rk_tensor* workspace;
  int64_t max_seqlen_q;
  const rk_tensor* q_scale;
  const rk_tensor* k_scale;
  const rk_tensor* v_scale;
} rk_flash_attn_varlen_args;
RK_API rk_status rk_flash_attn_varlen(const rk_flash_attn_varlen_args* args, rk_stream stream);

/* Bytes of workspace that a call of these sizes needs. page_size and max_pages are 0 for rk_flash_attn_varlen. */
typedef struct rk_flash_attn_sizes {
  uint32_t struct_size;
  int64_t tokens;
  int64_t batch;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t page_size;
  int64_t max_pages;
  int64_t max_seqlen_q;
} rk_flash_attn_sizes;
RK_API rk_status rk_flash_attn_workspace_size(const rk_flash_attn_sizes* sizes, int64_t* bytes);

/* Joins the attention of one query over two disjoint sets of keys. out_* [T, H, D] of one dtype, lse_* float32 [T, H];
 * a side with lse -inf is not used. out and lse may be side a's. */
typedef struct rk_merge_state_args {
  uint32_t struct_size;
  const rk_tensor* out_a;
  const rk_tensor* lse_a;
  const rk_tensor* out_b;
  const rk_tensor* lse_b;
  const rk_tensor* out;
  const rk_tensor* lse;
} rk_merge_state_args;
RK_API rk_status rk_merge_state(const rk_merge_state_args* args, rk_stream stream);

#endif
