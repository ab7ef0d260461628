/* All layers of a dense decoder (Llama, Mistral, Qwen2, Qwen3) in one call. */
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

/* q_norm and k_norm may be NULL, both. Outputs of qkv: the query heads, then the key heads, then the value heads; of
 * gate_up: gate, then up. window_left as in rk_attention_options. */
typedef struct rk_decoder_layer {
  const rk_tensor* input_norm;
  const rk_tensor* post_norm;
  const rk_tensor* q_norm;
  const rk_tensor* k_norm;
  rk_decoder_linear qkv;
  rk_decoder_linear o;
  rk_decoder_linear gate_up;
  rk_decoder_linear down;
  const rk_tensor* k_cache;
  const rk_tensor* v_cache;
  int32_t window_left;
} rk_decoder_layer;

/* For each layer: rmsnorm, qkv, fused_qk_norm_rope_store, flash_attn_with_kvcache, o, fused_add_rmsnorm, gate_up,
 * activation, down; then the last norm: the entries of those names one after the other, with their bits and their
 * errors; gate_up without a bias and SiLU over a multiple of 16 are one product with RK_GATE_HALVES. hidden [T, H]: the
 * embeddings, and in their place the result. All floating-point tensors have one dtype. Head counts follow from the
 * caches [pages, page_size, Hkv, D] and from the inputs Hq * D of `o`. positions, slot_mapping, page_table, kv_lens,
 * cu_seqlens_q and max_seqlen_q as in the entries. workspace: uint8, contiguous, at least rk_decoder_workspace_size()
 * of the same args (which needs no workspace). RK_UNSUPPORTED on a GPU. An error may come after some layers have run
 * and stored their keys and values. */
typedef struct rk_decoder_args {
  uint32_t struct_size;
  int32_t num_layers;
  const rk_decoder_layer* layers;
  const rk_tensor* norm;
  const rk_tensor* cos_sin_cache;
  float eps;
  float softmax_scale;
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
