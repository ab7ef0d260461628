/* A product of each head by a packed weight of its own. */
#ifndef RADIX_KERNELS_PACKED_HEADS_H
#define RADIX_KERNELS_PACKED_HEADS_H

#include "radix_kernels/linear.h"

typedef struct rk_packed_head {
  const rk_packed_desc* desc;
  const rk_tensor* packed;
} rk_packed_head;

/* out[:, h] = rk_linear of x[:, h] by heads[h], with its bits: the heads share the threads as one list of tasks. x [T,
 * H, k], out [T, H, n], last dimensions contiguous, other strides free; they must not overlap; the weights' dtype, out
 * also fp32; weights of one size. CPU only (RK_UNSUPPORTED). */
typedef struct rk_linear_heads_args {
  uint32_t struct_size;
  int32_t num_heads;
  const rk_packed_head* heads;
  const rk_tensor* x;
  const rk_tensor* out;
} rk_linear_heads_args;
RK_API rk_status rk_linear_heads(const rk_linear_heads_args* args, rk_stream stream);

#endif
