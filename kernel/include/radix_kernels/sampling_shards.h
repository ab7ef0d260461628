/* Sampling where each rank holds the logits of a part of the vocabulary: candidates of each shard, then one draw from
 * the candidates of all. The full logits are never in one place. GPU backends. */
#ifndef RADIX_KERNELS_SAMPLING_SHARDS_H
#define RADIX_KERNELS_SAMPLING_SHARDS_H

#include "radix_kernels/types.h"

/* Words of an empty record: those before its candidates. */
enum { RK_CANDIDATES_HEADER = 3 };

/* What one shard knows of each row. logits float32 [B, V / W]: ids first_id .. first_id + columns - 1 of vocab_size,
 * first_id a multiple of 4. Settings and edits as in rk_top_k_top_p_sampling_args; counts and bitmask are those of the
 * shard's columns, lists hold ids of the whole vocabulary.
 *
 * records int64 [B, 3 + C], C from 1 to 2048. A word orders candidates: (key << 32 | ~id), key the bits of a float32
 * with the sign bit flipped, or all bits flipped for a negative one. Words of a record:
 *   0  greedy or unfiltered row: the best word, of (logit, id) or (score, id); of a filtered row 0
 *   1  low half: the shard's largest edited logit, a float32 (NaN if one is; 0 of an unfiltered row whose
 *      logits are of moderate size: the GPU's scan does not ask for it); high half: the number n of candidates
 *   2  top-p without top-k: the sum of exp((logit - largest) / temperature), a float64
 *   3  filtered row: n words of (x, id), falling: the first of the shard; C of them, or all, or top_k
 * workspace: as rk_sampling_workspace_size. */
typedef struct rk_sampling_candidates_args {
  uint32_t struct_size;
  uint32_t draw_stream;
  int64_t vocab_size;
  int64_t first_id;
  const rk_tensor* logits;
  const rk_tensor* temperature;
  const rk_tensor* top_k;
  const rk_tensor* top_p;
  const rk_tensor* min_p;
  const rk_tensor* seed;
  const rk_tensor* position;
  const rk_tensor* records;
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
} rk_sampling_candidates_args;
RK_API rk_status rk_sampling_candidates(const rk_sampling_candidates_args* args, rk_stream stream);

/* The draw from records int64 [W, B, 3 + C], W * C at most 2048, in the order of the shards or any other: the id that
 * rk_top_k_top_p_sampling draws from the whole logits; -1 as there; -2 where the filters may keep ids that are not
 * among the candidates (top_k or a nucleus larger than C). out int32 [B]. */
typedef struct rk_sample_candidates_args {
  uint32_t struct_size;
  uint32_t draw_stream;
  int64_t vocab_size;
  const rk_tensor* records;
  const rk_tensor* temperature;
  const rk_tensor* top_k;
  const rk_tensor* top_p;
  const rk_tensor* min_p;
  const rk_tensor* seed;
  const rk_tensor* position;
  const rk_tensor* out;
} rk_sample_candidates_args;
RK_API rk_status rk_sample_candidates(const rk_sample_candidates_args* args, rk_stream stream);

#endif
