/* A step of a decoder in one call: a list of ops over numbered buffers. */
#ifndef RADIX_KERNELS_DECODER_H
#define RADIX_KERNELS_DECODER_H

#include "radix_kernels/activation.h"
#include "radix_kernels/linear.h"
#include "radix_kernels/packed_experts.h"
#include "radix_kernels/packed_heads.h"
#include "radix_kernels/types.h"

/* A buffer holds `columns` elements of each token of the call. Buffer 0 is the call's `hidden`; the others lie in its
 * workspace and have no contents before an op has written them. */
typedef struct rk_decoder_buffer {
  int64_t columns;
  rk_dtype dtype;
} rk_decoder_buffer;

/* Columns [first, first + count) of a buffer, of all tokens: what an op reads or writes. */
typedef struct rk_columns {
  int32_t buffer;
  int64_t first;
  int64_t count;
} rk_columns;

/* Each op is the entry that its record names, with its bits and its errors; fields that are not explained are those of
 * the entry. A tensor that may be left out is NULL. Columns that an op writes must not overlap those that it reads,
 * unless its entry says that they may be the same, or its record that it works in place. */
typedef enum rk_decoder_op_kind {
  RK_OP_RMSNORM = 0,
  RK_OP_LINEAR = 1,
  RK_OP_ROPE_STORE = 2,
  RK_OP_ATTENTION = 3,
  RK_OP_GATED_ACTIVATION = 4,
  RK_OP_ADD = 5,
  RK_OP_ROUTE = 6,
  RK_OP_EXPERTS = 7,
  RK_OP_LATENT_STORE = 8,
  RK_OP_LATENT_ATTENTION = 9,
  RK_OP_SCALE = 10,
  RK_OP_LATENT_PREFILL = 11
} rk_decoder_op_kind;

/* rk_rmsnorm. */
typedef struct rk_rmsnorm_op {
  rk_columns x;
  rk_columns out;
  const rk_tensor* weight;
  float eps;
} rk_rmsnorm_op;

/* rk_linear, with keep_x for the tokens of the last num_expanded entries. residual: count 0 for none. */
typedef struct rk_linear_op {
  rk_columns x;
  rk_columns out;
  rk_columns residual;
  const rk_packed_desc* desc;
  const rk_tensor* packed;
  const rk_tensor* bias;
  int32_t gate;
} rk_linear_op;

/* The keys and values of a layer: [pages, page_size, heads, D]; scales of INT8 caches. */
typedef struct rk_layer_cache {
  const rk_tensor* k;
  const rk_tensor* v;
  const rk_tensor* k_scale;
  const rk_tensor* v_scale;
} rk_layer_cache;

/* rk_fused_qk_norm_rope_store: q, k and v are heads of the cache's size. */
typedef struct rk_rope_store_op {
  rk_columns q;
  rk_columns k;
  rk_columns v;
  rk_layer_cache cache;
  const rk_tensor* q_norm;
  const rk_tensor* k_norm;
  const rk_tensor* cos_sin_cache;
  float eps;
  int32_t is_neox;
} rk_rope_store_op;

/* rk_flash_attn_with_kvcache, causal. */
typedef struct rk_attention_op {
  rk_columns q;
  rk_columns out;
  rk_layer_cache cache;
  const rk_tensor* sinks;
  float softmax_scale;
  float softcap;
  int32_t window_left;
} rk_attention_op;

/* rk_silu_and_mul, rk_gelu_and_mul, rk_gelu_tanh_and_mul. activation: RK_ACTIVATION_* of these. */
typedef struct rk_gated_activation_op {
  rk_columns x;
  rk_columns out;
  int32_t activation;
} rk_gated_activation_op;

/* to += x * factor, or x * scale with a factor of 1, in float32, rounded once; whole buffers of one dtype. scale: fp32,
 * one column, or count 0. */
typedef struct rk_add_op {
  int32_t to;
  int32_t x;
  rk_columns scale;
  float factor;
} rk_add_op;

/* x *= factors[positions], in float32, rounded once. factors: fp32, contiguous, a number for each position. */
typedef struct rk_scale_op {
  rk_columns x;
  const rk_tensor* factors;
} rk_scale_op;

/* rk_topk_softmax (with groups; its weights times scaling), rk_topk_sigmoid (with correction_bias or without),
 * rk_moe_fused_gate. */
enum { RK_ROUTE_SOFTMAX = 0, RK_ROUTE_SIGMOID = 1, RK_ROUTE_GROUPED = 2 };
typedef struct rk_route_op {
  rk_columns logits;
  rk_columns weights;
  rk_columns ids;
  const rk_tensor* bias;
  int32_t router;
  int32_t renormalize;
  int32_t groups;
  int32_t top_groups;
  float scaling;
} rk_route_op;

/* rk_fused_experts_packed. */
typedef struct rk_experts_op {
  rk_columns x;
  rk_columns weights;
  rk_columns ids;
  rk_columns out;
  const rk_packed_expert* experts;
  int32_t num_experts;
  const rk_tensor* bias1;
  const rk_tensor* bias2;
  rk_gating gating;
} rk_experts_op;

/* Latent attention. q: heads of equal size, the last R elements of each its rotary part; kv_cache [pages, page_size,
 * L + R], no FP8 form. First rk_apply_rope_inplace of these parts and of rope [T, R], then rk_store_mla_kv. */
typedef struct rk_latent_store_op {
  rk_columns q;
  rk_columns latent;
  rk_columns rope;
  int32_t heads;
  const rk_tensor* kv_cache;
  const rk_tensor* cos_sin_cache;
  int32_t is_neox;
} rk_latent_store_op;

/* Latent attention of the entries before the last num_expanded, absorbed. q: heads of N elements and R rotary ones,
 * out: heads of V, apart from q. rk_linear_heads of the N by absorb [L, N]; rk_mla_decode of them and the rotary ones,
 * causal, with any_split; rk_linear_heads by values [V, L]. */
typedef struct rk_latent_attention_op {
  rk_columns q;
  rk_columns out;
  int32_t heads;
  const rk_packed_head* absorb;
  const rk_packed_head* values;
  const rk_tensor* kv_cache;
  float softmax_scale;
} rk_latent_attention_op;

/* Latent attention of the last num_expanded entries, un-absorbed; q and out as above. rk_gather_mla_kv of all tokens of
 * an entry; rk_linear, with keep_x, of their latent values by expand [heads * (N + V), L]: keys, then values of each
 * head; rk_concat_mla_k with the rotary ones; rk_flash_attn_varlen, causal. Entries whose keys and values take 64 MiB
 * together, or one that takes more, are expanded at a time. RK_INVALID for an entry whose kv_lens is less than its
 * queries. */
typedef struct rk_latent_prefill_op {
  rk_columns q;
  rk_columns out;
  int32_t heads;
  const rk_packed_desc* expand_desc;
  const rk_tensor* expand;
  const rk_tensor* kv_cache;
  float softmax_scale;
} rk_latent_prefill_op;

/* record: the struct of `kind`. */
typedef struct rk_decoder_op {
  rk_decoder_op_kind kind;
  const void* record;
} rk_decoder_op;

/* Runs the ops one after the other over the tokens of a step. hidden [T, H], contiguous: the embeddings, and in their
 * place what the ops leave in buffer 0. buffers [num_buffers]: the first describes hidden. positions, slot_mapping,
 * page_table, kv_lens, cu_seqlens_q and max_seqlen_q as in the entries. workspace: uint8, contiguous, at least
 * rk_decoder_workspace_size() of the same args, which reads hidden's and page_table's shapes and max_seqlen_q, and
 * with num_expanded kv_lens and cu_seqlens_q. num_expanded: entries, the last ones, of prompts: their latent
 * attention is un-absorbed. RK_UNSUPPORTED on a GPU. An error may come after some ops have run and stored keys and
 * values. */
typedef struct rk_decoder_args {
  uint32_t struct_size;
  int32_t num_buffers;
  const rk_decoder_buffer* buffers;
  const rk_decoder_op* ops;
  int64_t num_ops;
  const rk_tensor* hidden;
  const rk_tensor* positions;
  const rk_tensor* slot_mapping;
  const rk_tensor* page_table;
  const rk_tensor* kv_lens;
  const rk_tensor* cu_seqlens_q;
  int64_t max_seqlen_q;
  const rk_tensor* workspace;
  int64_t num_expanded;
} rk_decoder_args;
RK_API rk_status rk_decoder(const rk_decoder_args* args, rk_stream stream);
RK_API rk_status rk_decoder_workspace_size(const rk_decoder_args* args, int64_t* bytes);

#endif
