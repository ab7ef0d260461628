/* Multi-head latent attention over a paged latent cache, absorbed form. */
#ifndef RADIX_KERNELS_MLA_H
#define RADIX_KERNELS_MLA_H

#include "radix_kernels/types.h"

/* q_nope, out [T, H, L], q_rope [T, H, R], one dtype (bf16, fp16, fp32); L a multiple of 16 up to 512, R up to 64.
 * kv_cache [pages, page_size, L + R] of that dtype: L latent values, which are key and value, then R rotary ones, which
 * are key only; or, with L 512, R 64 and 16 bits, uint8 [pages, page_size, 656]: 512 e4m3, 4 float32 scales of 128
 * latent values each, 64 bf16 rotary values. Last dimensions contiguous; on a GPU addresses of rows multiples of 16
 * bytes. Hopper: 16 bits, L 512 and R 64; the CPU: not the FP8 form; else RK_UNSUPPORTED. page_table int32 [B,
 * max_pages], kv_lens int32 [B] (new tokens included), cu_seqlens_q int32 [B + 1] from 0 to T; the q tokens of a row
 * are the last of its kv tokens. lse float32 [T, H] (natural log) may be NULL. A query that sees nothing gets out 0 and
 * lse -inf. Entries of page_table past ceil(kv_len / page_size) and slots past kv_len are never used. max_seqlen_q: the
 * most query tokens of a row, 0 unknown: a hint about speed. any_split: 0: a row's sum is split at fixed positions, so
 * that its bits depend on its own length alone; 1: where the work of the batch divides evenly, which is faster.
 * workspace: uint8, contiguous, 256-byte aligned, of at least rk_mla_decode_workspace_size(). */
typedef struct rk_mla_decode_args {
  uint32_t struct_size;
  float softmax_scale;
  int32_t causal;
  const rk_tensor* q_nope;
  const rk_tensor* q_rope;
  const rk_tensor* kv_cache;
  const rk_tensor* page_table;
  const rk_tensor* kv_lens;
  const rk_tensor* cu_seqlens_q;
  const rk_tensor* out;
  const rk_tensor* lse;
  const rk_tensor* workspace;
  int64_t max_seqlen_q;
  int64_t any_split;
} rk_mla_decode_args;
RK_API rk_status rk_mla_decode(const rk_mla_decode_args* args, rk_stream stream);

/* Bytes of workspace that a call of these sizes needs. kv_item_size: bytes of an element of kv_cache, 2, or 1 in the
 * FP8 form; 0, of an older caller: enough for either. */
typedef struct rk_mla_decode_sizes {
  uint32_t struct_size;
  int64_t tokens;
  int64_t batch;
  int64_t heads;
  int64_t page_size;
  int64_t max_pages;
  int64_t max_seqlen_q;
  int64_t any_split;
  int64_t kv_item_size;
} rk_mla_decode_sizes;
RK_API rk_status rk_mla_decode_workspace_size(const rk_mla_decode_sizes* sizes, int64_t* bytes);

#endif
