/* Attention of ragged queries over a paged or a ragged KV, and the merge of partial results. */
#ifndef RADIX_KERNELS_ATTENTION_H
#define RADIX_KERNELS_ATTENTION_H

#include "radix_kernels/types.h"

/* What both attention entries share. The q tokens of a row are the last of its kv tokens. window_left: earlier tokens
 * seen besides the token at the query's own position, -1 all; window_right -1, or 0 (the same as causal). softcap above
 * 0: scores become softcap * tanh(score / softcap). A query that sees nothing gets out 0 and lse -inf (with sinks: the
 * sink). A row's bits depend on neither the other rows of the batch nor the number of threads: on the CPU the KV is cut
 * at multiples of 512 tokens and the parts are combined in order. */
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
 * Hq a multiple of Hkv; D a multiple of 16 up to 256. Entries of page_table past ceil(kv_len / page_size) and slots
 * past kv_len are never read; on the CPU a page id that is read and out of range is RK_INVALID. */
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
} rk_flash_attn_with_kvcache_args;
RK_API rk_status rk_flash_attn_with_kvcache(const rk_flash_attn_with_kvcache_args* args, rk_stream stream);

/* The same over k, v [Tk, Hkv, D] with cu_seqlens_k int32 [B + 1] from 0 to Tk. */
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
} rk_flash_attn_varlen_args;
RK_API rk_status rk_flash_attn_varlen(const rk_flash_attn_varlen_args* args, rk_stream stream);

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
