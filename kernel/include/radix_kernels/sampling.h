/* Penalties, sampling and log-probabilities over rows of float32 logits [B, V], last dimension contiguous. */
#ifndef RADIX_KERNELS_SAMPLING_H
#define RADIX_KERNELS_SAMPLING_H

#include "radix_kernels/types.h"

/* counts int32 [S, V]: bit 30 says that the token is in the prompt, the low 30 bits how often it was generated.
 * slots int32 [B]: the row of counts of each row of logits, -1 leaves it alone. repetition, frequency, presence
 * float32 [B]. In place: x = x > 0 ? x / r : x * r for tokens of prompt or output, then
 * x -= frequency * count + presence for generated ones. */
typedef struct rk_apply_penalties_args {
  uint32_t struct_size;
  const rk_tensor* logits;
  const rk_tensor* counts;
  const rk_tensor* slots;
  const rk_tensor* repetition;
  const rk_tensor* frequency;
  const rk_tensor* presence;
} rk_apply_penalties_args;
RK_API rk_status rk_apply_penalties(const rk_apply_penalties_args* args, rk_stream stream);

/* counts[slots[b], ids[b]] += 1; slots, ids int32 [B]; -1 in either skips the row. */
typedef struct rk_count_tokens_args {
  uint32_t struct_size;
  const rk_tensor* counts;
  const rk_tensor* slots;
  const rk_tensor* ids;
} rk_count_tokens_args;
RK_API rk_status rk_count_tokens(const rk_count_tokens_args* args, rk_stream stream);

/* Bytes of workspace that a call with logits [rows, columns] needs: of rk_top_k_top_p_sampling and rk_token_logprobs.
 * 0 on the CPU. */
typedef struct rk_sampling_sizes {
  uint32_t struct_size;
  int64_t rows;
  int64_t columns;
} rk_sampling_sizes;
RK_API rk_status rk_sampling_workspace_size(const rk_sampling_sizes* sizes, int64_t* bytes);

/* One draw a row. temperature, top_p, min_p float32 [B]; top_k int32 [B]; seed, position int64 [B]; out int32 [B].
 * x = logit / temperature; ids are ordered by (x descending, id ascending); top-k keeps the first top_k (off: <= 0 or
 * >= V), top-p of the rest those with less than top_p of the mass before them (off: >= 1), min-p of the rest those with
 * at least min_p times the largest probability (off: <= 0). The token is the kept id with the largest x - log(E),
 * E = -log1p(-u) in float32, ties to the lowest id; u = (w + 0.5) * 2^-32, at most 1 - 2^-24, w = word id % 4 of
 * Philox4x32-10 with key = seed (low word first) and counter (id / 4, position, stream, 0).
 * Temperature below 2^-126, or so small that max / temperature overflows: the largest logit; infinity counts as the
 * largest float32. NaN, +inf or all -inf: -1.
 *
 * What may change the logits first, each step NULL or whole, in this order; the tensor itself stays as it is:
 *   bias        bias_ids int32, bias_values float32 [B, M]: x[id] += value; a negative id ends a row's list
 *   penalties   counts, slots, repetition, frequency, presence: as rk_apply_penalties
 *   minimum     stop_ids int32 [B, M], min_position int64 [B]: ids that are -inf while position < min_position; a
 *               negative id ends a row's list
 *   grammar     bitmask int32 [B, ceil(V / 32)]: id is allowed if bit id % 32 of word id / 32 is set, else -inf
 * NaN, +inf and "all -inf" are those of the changed logits.
 *
 * logprob float32 [B], top_logprobs float32 and top_ids int32 [B, top_n]: all NULL, or as rk_token_logprobs of the
 * drawn ids and of the logits as they are in the tensor.
 *
 * workspace uint8: rk_sampling_workspace_size bytes, aligned to 16; may be NULL where that is 0. */
typedef struct rk_top_k_top_p_sampling_args {
  uint32_t struct_size;
  uint32_t draw_stream; /* 0 sample, 1 draft acceptance, 2 residual */
  const rk_tensor* logits;
  const rk_tensor* temperature;
  const rk_tensor* top_k;
  const rk_tensor* top_p;
  const rk_tensor* min_p;
  const rk_tensor* seed;
  const rk_tensor* position;
  const rk_tensor* out;
  const rk_tensor* workspace;
  const rk_tensor* bias_ids;
  const rk_tensor* bias_values;
  const rk_tensor* counts;
  const rk_tensor* slots;
  const rk_tensor* repetition;
  const rk_tensor* frequency;
  const rk_tensor* presence;
  const rk_tensor* stop_ids;
  const rk_tensor* min_position;
  const rk_tensor* bitmask;
  const rk_tensor* logprob;
  const rk_tensor* top_logprobs;
  const rk_tensor* top_ids;
} rk_top_k_top_p_sampling_args;
RK_API rk_status rk_top_k_top_p_sampling(const rk_top_k_top_p_sampling_args* args, rk_stream stream);

/* Log-softmax at ids (int32 [B], -1: NaN) into logprob float32 [B], and its top_n largest into top_logprobs float32 and
 * top_ids int32 [B, top_n], largest first, ties to the lowest id. A row with NaN: NaN, and ids -1 on a GPU. workspace:
 * as above. */
typedef struct rk_token_logprobs_args {
  uint32_t struct_size;
  const rk_tensor* logits;
  const rk_tensor* ids;
  const rk_tensor* logprob;
  const rk_tensor* top_logprobs;
  const rk_tensor* top_ids;
  const rk_tensor* workspace;
} rk_token_logprobs_args;
RK_API rk_status rk_token_logprobs(const rk_token_logprobs_args* args, rk_stream stream);

#endif
