/* What an inference engine does between the model's calls: the tensors of a step, and its accepted tokens. */
#ifndef RADIX_KERNELS_STEP_H
#define RADIX_KERNELS_STEP_H

#include "radix_kernels/types.h"

/* Makes the tensors of a step of B entries, T tokens and S samples from what the host knows and what only the device
 * knows. int32 unless said otherwise; everything is contiguous but the rows of entries and tokens, whose stride is
 * free. entries [4, B]: row of row_pages; base, an element of committed_len; tokens after the base, with the new ones;
 * commit, an element of committed_len. tokens [4, T]: base; tokens between the base and this one; first element of the
 * token's row in row_pages, or -1: it is not stored; source: an id, or ~e for element e of next_token. sample_tokens
 * [S]: token whose result gives a sample. next_token: any shape. committed_len [R]: tokens of each row. row_pages
 * [rows, pages]: the page table of all rows, in pages of page_size tokens. Written: kv_lens [B] = committed_len[base] +
 * tokens after it; positions [T] likewise; input_ids [T], where a negative element of next_token is read as 0;
 * slot_mapping int64 [T] = page * page_size + position % page_size, or -1; page_table [B, at most pages], the first
 * elements of each entry's row; sample_positions int64 [S], one behind the token's position; last committed_len[commit]
 * = kv_lens. No commit is a base; of one that several entries name, one's length remains. An index outside of its
 * tensor is RK_INVALID on the CPU, before anything is written; on a GPU its entry, token or sample is skipped. */
typedef struct rk_fill_step_tensors_args {
  uint32_t struct_size;
  int32_t page_size;
  const rk_tensor* entries;
  const rk_tensor* tokens;
  const rk_tensor* sample_tokens;
  const rk_tensor* next_token;
  const rk_tensor* committed_len;
  const rk_tensor* row_pages;
  const rk_tensor* kv_lens;
  const rk_tensor* input_ids;
  const rk_tensor* positions;
  const rk_tensor* slot_mapping;
  const rk_tensor* page_table;
  const rk_tensor* sample_positions;
} rk_fill_step_tensors_args;
RK_API rk_status rk_fill_step_tensors(const rk_fill_step_tensors_args* args, rk_stream stream);

/* Moves rows past what they accept of a step's samples, int32 all: ids [S] of N entries; entry n has the samples
 * cu_samples[n] .. cu_samples[n + 1] - 1, at least one, or sample n alone where cu_samples and drafts are NULL (then
 * S = N). Its first sample is accepted, and each further one i while drafts[i] == ids[i - 1]; drafts [S].
 * next_token [R, any], last dim contiguous: element [rows[n], 0] = the last accepted id; committed_len [R] grows by the
 * number of accepted ones at grow_rows[n]. Where the first id is negative neither changes, unless all_drawn.
 * counts [N], or NULL: the number of accepted ones, whatever the ids. Rows may repeat: next_token then holds either id.
 * An index outside of its tensor is RK_INVALID on the CPU, before anything is written; on a GPU the entry is skipped.
 */
typedef struct rk_accept_tokens_args {
  uint32_t struct_size;
  int32_t all_drawn;
  const rk_tensor* ids;
  const rk_tensor* rows;
  const rk_tensor* grow_rows;
  const rk_tensor* next_token;
  const rk_tensor* committed_len;
  const rk_tensor* cu_samples;
  const rk_tensor* drafts;
  const rk_tensor* counts;
} rk_accept_tokens_args;
RK_API rk_status rk_accept_tokens(const rk_accept_tokens_args* args, rk_stream stream);

#endif
