/* A decode step of a few rows through all layers of a decoder, in one kernel. */
#ifndef RADIX_KERNELS_PERSISTENT_DECODER_H
#define RADIX_KERNELS_PERSISTENT_DECODER_H

#include "radix_kernels/types.h"

/* A layer with grouped-query attention and a gated MLP, bfloat16 but for q_norm and k_norm, float32. H is the hidden
 * size, D = 128 a head's. Weights [outputs, inputs], contiguous: qkv [(heads + 2 kv_heads) D, H], o [H, heads D],
 * gate_up [2 W, H], gate before up, down [H, W]. qkv_bias [(heads + 2 kv_heads) D] or NULL. input_norm, post_norm [H];
 * q_norm, k_norm [D], both or neither. k_cache, v_cache [pages, page_size, kv_heads, D] of one shape and strides in all
 * layers, the last contiguous, page_size a power of two. router: NULL, or [E, H], and the MLP is a mixture of E
 * experts: gate_up [E, 2 W, H], down [E, H, W]; in all layers or in none. The scales: all or none, in all layers;
 * qkv, o, gate_up and down are float8_e4m3fn then, each with a float32 for each 128 x 128 elements: [outputs / 128,
 * inputs / 128], of experts [E, outputs / 128, inputs / 128]. */
typedef struct rk_persistent_layer {
  const rk_tensor* qkv;
  const rk_tensor* o;
  const rk_tensor* gate_up;
  const rk_tensor* down;
  const rk_tensor* qkv_bias;
  const rk_tensor* input_norm;
  const rk_tensor* post_norm;
  const rk_tensor* q_norm;
  const rk_tensor* k_norm;
  const rk_tensor* k_cache;
  const rk_tensor* v_cache;
  const rk_tensor* router;
  const rk_tensor* qkv_scale;
  const rk_tensor* o_scale;
  const rk_tensor* gate_up_scale;
  const rk_tensor* down_scale;
} rk_persistent_layer;

/* What all calls share. final_norm [H]. cos_sin_cache float32 [positions, D], rotated in halves. eps: of the norms over
 * H; qk_eps: of q_norm and k_norm. top_k: experts that a token passes, the largest logits (equal ones: the lower
 * numbers), each with its softmax over all experts or, with renormalize, over the chosen ones; 0 without a router.
 * workspace: uint8, contiguous, 256-byte aligned, of rk_persistent_decoder_workspace_size bytes, zero before
 * rk_prepare_persistent_decoder; the calls' own from then on, one call at a time. */
typedef struct rk_persistent_decoder {
  uint32_t struct_size;
  int32_t num_layers;
  const rk_persistent_layer* layers;
  const rk_tensor* final_norm;
  const rk_tensor* cos_sin_cache;
  int32_t heads;
  int32_t kv_heads;
  float eps;
  float qk_eps;
  float softmax_scale;
  const rk_tensor* workspace;
  int32_t top_k;
  int32_t renormalize;
} rk_persistent_decoder;

/* bytes: of the workspace. max_tokens: the most tokens of a call, at least 1. RK_UNSUPPORTED where no kernel serves the
 * layers: another GPU than Hopper, other types or sizes. Ignores workspace. */
RK_API rk_status rk_persistent_decoder_workspace_size(const rk_persistent_decoder* decoder, int64_t* bytes,
                                                      int32_t* max_tokens);
/* Writes what the calls need into the workspace. Waits for the device; not in a graph. */
RK_API rk_status rk_prepare_persistent_decoder(const rk_persistent_decoder* decoder, rk_stream stream);

/* hidden [T, H], contiguous: the embeddings of one new token of each of T rows, and in their place the normed output.
 * positions int32 [T], slot_mapping int64 [T] (-1: not stored), page_table int32 [T, pages of the longest row], last
 * contiguous, kv_lens int32 [T] with the new token: as in rk_fused_qk_norm_rope_store and rk_flash_attn_with_kvcache.
 */
typedef struct rk_persistent_decoder_args {
  uint32_t struct_size;
  const rk_persistent_decoder* decoder;
  const rk_tensor* hidden;
  const rk_tensor* positions;
  const rk_tensor* slot_mapping;
  const rk_tensor* page_table;
  const rk_tensor* kv_lens;
} rk_persistent_decoder_args;
RK_API rk_status rk_persistent_decode(const rk_persistent_decoder_args* args, rk_stream stream);

#endif
