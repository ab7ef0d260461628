/* Linear layers and embeddings over packed weights. */
#ifndef RADIX_KERNELS_LINEAR_H
#define RADIX_KERNELS_LINEAR_H

#include "radix_kernels/types.h"

/* A packed weight is bytes in a layout private to this library and machine, never saved or sent.
 * `layout` is what rk_packed_weight_info said for dtype; n outputs, k inputs, of the unpacked [n, k] weight. */
typedef struct rk_packed_desc {
  uint32_t struct_size;
  uint32_t layout;
  rk_dtype dtype;
  int64_t n;
  int64_t k;
} rk_packed_desc;

enum {
  RK_LAYOUT_PAIRS16 = 1, /* bf16: [N/16][K/2][16][2] */
  RK_LAYOUT_LANES16 = 2  /* fp16, fp32: [N/16][K][16] */
};

/* Fills desc->layout from desc->dtype, n and k, and *bytes with the size of the packed storage. */
RK_API rk_status rk_packed_weight_info(rk_packed_desc* desc, int64_t* bytes);

/* packed (uint8 [bytes], 64-byte aligned, contiguous) = weight [n, k] (bf16, fp16, fp32; free strides). */
typedef struct rk_pack_weight_args {
  uint32_t struct_size;
  const rk_packed_desc* desc;
  const rk_tensor* weight;
  const rk_tensor* packed;
} rk_pack_weight_args;
RK_API rk_status rk_pack_weight(const rk_pack_weight_args* args, rk_stream stream);

/* The exact inverse: weight [n, k] = packed. */
typedef struct rk_unpack_weight_args {
  uint32_t struct_size;
  const rk_packed_desc* desc;
  const rk_tensor* packed;
  const rk_tensor* weight;
} rk_unpack_weight_args;
RK_API rk_status rk_unpack_weight(const rk_unpack_weight_args* args, rk_stream stream);

/* out [..., n] = x [..., k] * weight^T + bias; float32 sums in ascending k, rounded once to out's dtype.
 * x has the weight's dtype; bias [n] (optional) the weight's or fp32; out the weight's or fp32.
 * A row's bits depend on neither the other rows nor the number of threads. */
typedef struct rk_linear_args {
  uint32_t struct_size;
  const rk_packed_desc* desc;
  const rk_tensor* x;
  const rk_tensor* packed;
  const rk_tensor* bias;
  const rk_tensor* out;
} rk_linear_args;
RK_API rk_status rk_linear(const rk_linear_args* args, rk_stream stream);

/* out [T, k] = row ids[t] of the packed weight, exact. ids int32 or int64 [T]; on the CPU an id outside [0, n) is
 * RK_INVALID and nothing is written. */
typedef struct rk_embedding_args {
  uint32_t struct_size;
  const rk_packed_desc* desc;
  const rk_tensor* ids;
  const rk_tensor* packed;
  const rk_tensor* out;
} rk_embedding_args;
RK_API rk_status rk_embedding(const rk_embedding_args* args, rk_stream stream);

#endif
