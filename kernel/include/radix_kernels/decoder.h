/* All layers of a dense decoder in one call. */
#ifndef RADIX_KERNELS_DECODER_H
#define RADIX_KERNELS_DECODER_H

#include "radix_kernels/linear.h"
#include "radix_kernels/types.h"

/* What stands between the two products of the MLP. */
enum { RK_ACTIVATION_SILU = 0, RK_ACTIVATION_GELU = 1, RK_ACTIVATION_GELU_TANH = 2 };

/* A packed weight and its bias (may be NULL), as in rk_linear_args. */
typedef struct rk_decoder_linear {
  const rk_packed_desc* desc;
  const rk_tensor* packed;
  const rk_tensor* bias;
} rk_decoder_linear;

/* Norms may be NULL: none; q_norm and k_norm both or neither. attention_norm and mlp_norm are of the inputs of these
 * blocks, attention_out_norm and mlp_out_norm of what they add to the residual. Outputs of qkv: the query heads, then
 * the key heads, then the value heads; of gate_up: gate, then up. k_scale, v_scale: of INT8 caches, else NULL. sinks as
 * in rk_flash_attn_with_kvcache_args, window_left, softmax_scale and softcap as in rk_attention_options, cos_sin_cache
 * and is_neox as in rk_fused_qk_norm_rope_store_args. */
typedef struct rk_decoder_layer {
  const rk_tensor* attention_norm;
  const rk_tensor* attention_out_norm;
  const rk_tensor* mlp_norm;
  const rk_tensor* mlp_out_norm;
  const rk_tensor* q_norm;
  const rk_tensor* k_norm;
  rk_decoder_linear qkv;
  rk_decoder_linear o;
  rk_decoder_linear gate_up;
  rk_decoder_linear down;
  const rk_tensor* k_cache;
  const rk_tensor* v_cache;
  const rk_tensor* k_scale;
  const rk_tensor* v_scale;
  const rk_tensor* cos_sin_cache;
  const rk_tensor* sinks;
  float softmax_scale;
  float softcap;
  int32_t window_left;
  int32_t is_neox;
} rk_decoder_layer;

/* For each layer: rmsnorm, qkv, fused_qk_norm_rope_store, flash_attn_with_kvcache, o, rmsnorm, gate_up, activation,
 * down; then the last norm: the entries of those names one after the other, with their bits and their errors; o and
 * down add to the residual before they are rounded, or, where a norm is behind them, it does so in a sum of its own;
 * gate_up without a bias and SiLU over a multiple of 16 are one product with RK_GATE_HALVES. hidden [T, H]: the
 * embeddings, and in their place the result. All floating-point tensors but scales have one dtype. Head counts follow
 * from the caches [pages, page_size, Hkv, D] and from the inputs Hq * D of `o`. positions, slot_mapping, page_table,
 * kv_lens, cu_seqlens_q and max_seqlen_q as in the entries. workspace: uint8, contiguous, at least
 * rk_decoder_workspace_size() of the same args (which needs no workspace). RK_UNSUPPORTED on a GPU. An error may come
 * after some layers have run and stored their keys and values. */
typedef struct rk_decoder_args {
  uint32_t struct_size;
  int32_t num_layers;
  const rk_decoder_layer* layers;
  const rk_tensor* norm;
  float eps;
  int32_t activation;
  const rk_tensor* hidden;
  const rk_tensor* positions;
  const rk_tensor* slot_mapping;
  const rk_tensor* page_table;
  const rk_tensor* kv_lens;
  const rk_tensor* cu_seqlens_q;
  int64_t max_seqlen_q;
  const rk_tensor* workspace;
} rk_decoder_args;
RK_API rk_status rk_decoder(const rk_decoder_args* args, rk_stream stream);
RK_API rk_status rk_decoder_workspace_size(const rk_decoder_args* args, int64_t* bytes);

#endif
