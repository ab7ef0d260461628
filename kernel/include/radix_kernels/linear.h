/* Linear layers and embeddings over packed weights. */
#ifndef RADIX_KERNELS_LINEAR_H
#define RADIX_KERNELS_LINEAR_H

#include "radix_kernels/activation.h"
#include "radix_kernels/gemm.h" /* RK_GATE_* */
#include "radix_kernels/types.h"

/* How the elements of a packed weight are held, and what x becomes when it meets them. */
enum {
  RK_WEIGHT_DENSE = 0, /* x's dtype */
  RK_WEIGHT_INT8 = 1,  /* int8 code times a scale, plus a minimum; x as it is */
  RK_WEIGHT_INT4 = 2,  /* (4-bit code - zero) times a scale, or code times a scale plus a minimum; x as it is */
  RK_WEIGHT_W8A8 = 3,  /* as INT8; x in int8 with a scale for each row and group, made by the op */
  RK_WEIGHT_W4A8 = 4,  /* as INT4; x as for W8A8 */
  RK_WEIGHT_Q4_K = 5,  /* 4-bit code (0 .. 15) times a small integer for each group times a number for 256 inputs, plus
                        * the like of minima; x in int8 with a scale for each row and 256 inputs, made by the op */
  RK_WEIGHT_Q5_K = 6,  /* the same with codes 0 .. 31 */
  RK_WEIGHT_Q6_K = 7,  /* the same with codes -32 .. 31 */
  RK_WEIGHT_MXFP4 = 8, /* 4-bit float (e2m1) times a power of two (e8m0); x as for W8A8 */
  RK_WEIGHT_FP8 = 9    /* 8-bit float (e4m3fn) times a scale; x as it is */
};

/* A packed weight is bytes in a layout private to this library and machine, never saved or sent.
 * `layout` is what rk_packed_weight_info said for dtype and kind; n outputs, k inputs, of the unpacked [n, k] weight.
 * dtype: of the elements when dense; else of x and of what rk_embedding gives.
 * The rest is 0 for a dense weight. group: inputs that share a scale, 32, 64 or 128; 8-bit codes also 16, or 0 for all
 * of a row; of the Q*_K kinds those that share a sub-scale, 32, for Q6_K 16; 32 for MXFP4. scale_dtype: uint8 for
 * MXFP4, else bf16, fp16 or fp32. zeros: 1 when 4-bit codes have zero points of their own; otherwise each is
 * 8. mins: 1 when a group has a minimum, of scale_dtype, that its elements are counted from: then codes have no zero
 * points, and that of 4-bit ones is 0. */
typedef struct rk_packed_desc {
  uint32_t struct_size;
  uint32_t layout;
  rk_dtype dtype;
  int64_t n;
  int64_t k;
  uint32_t kind;
  uint32_t group;
  rk_dtype scale_dtype;
  uint32_t zeros;
  uint32_t mins;
} rk_packed_desc;

enum {
  RK_LAYOUT_PAIRS16 = 1,   /* bf16: [N/16][K/2][16][2] */
  RK_LAYOUT_LANES16 = 2,   /* fp16, fp32: [N/16][K][16] */
  RK_LAYOUT_QUADS16 = 3,   /* int8: [N/16] x { codes [K/4][16][4], scales [groups][16], mins [groups][16] } */
  RK_LAYOUT_NIBBLES16 = 4, /* int4: [N/16] x { codes [K/8][16][4], scales [groups][16], zeros or mins [groups][16] } */
  RK_LAYOUT_SUPERS16 = 5,  /* Q*_K: [N/16][K/256] x { codes, sub-scales, sub-minima, scales [16], mins [16] } */
  RK_LAYOUT_FRAGMENTS64 = 6, /* Hopper: codes [N/64][K/64][4][32 lanes], scales and zeros [N/64][groups][64]; of MXFP4
                              * scales [N/64][K/64][64][2] */
  RK_LAYOUT_BYTES16 = 7      /* FP8: [N/16] x { codes [K/2][16][2], scales [groups][16] } */
};

/* Fills desc->layout from the rest of desc, and *bytes with the size of the packed storage. */
RK_API rk_status rk_packed_weight_info(rk_packed_desc* desc, int64_t* bytes);

/* packed (uint8 [bytes], 64-byte aligned, contiguous) = weight. Strides are free.
 *   dense         weight [n, k] of desc->dtype
 *   int8, W8A8    int8 [n, k], scales [n, ceil(k / group)] of desc->scale_dtype ([n, 1] for whole rows)
 *   FP8           float8_e4m3fn [n, k], none NaN (RK_INVALID otherwise); scales as int8's
 *   int4, W4A8    uint8 [n, ceil(k / 2)], input 2j in the low and 2j + 1 in the high half of byte j; scales as above;
 *                 zeros uint8 [n, ceil(k / group)], 0 .. 16, when desc->zeros
 *   MXFP4         weight as int4, scales uint8 [n, ceil(k / 32)], 0 .. 252: the exponent plus 127 (RK_INVALID above,
 * where the largest element is no float32) all but that  mins as scales, when desc->mins Q4_K          weight as int4,
 * Q5_K and Q6_K: int8 [n, k] in the range of the kind (RK_INVALID otherwise). scales [n, ceil(k / 256)], sub_scales
 * int8 [n, ceil(k / group)]; when desc->mins, mins as scales and sub_mins uint8 as sub_scales. element = code * scale *
 * sub-scale + min * sub-min The other quantized kinds with scales NULL: weight is [n, k] of desc->dtype and is
 * quantized here, symmetrically, one scale a group: max|w| / 127 (FP8: / 448), or w / -8 of the w that is largest in
 * size; rounded to scale_dtype; code = round(w / scale) to the nearest even. Weights that are not finite are
 * RK_INVALID. */
typedef struct rk_pack_weight_args {
  uint32_t struct_size;
  const rk_packed_desc* desc;
  const rk_tensor* weight;
  const rk_tensor* packed;
  const rk_tensor* scales;
  const rk_tensor* zeros;
  const rk_tensor* mins;
  const rk_tensor* sub_scales;
  const rk_tensor* sub_mins;
} rk_pack_weight_args;
RK_API rk_status rk_pack_weight(const rk_pack_weight_args* args, rk_stream stream);

/* The exact inverse: weight [n, k], or codes, scales, zeros, mins, sub_scales and sub_mins, = packed. */
typedef struct rk_unpack_weight_args {
  uint32_t struct_size;
  const rk_packed_desc* desc;
  const rk_tensor* packed;
  const rk_tensor* weight;
  const rk_tensor* scales;
  const rk_tensor* zeros;
  const rk_tensor* mins;
  const rk_tensor* sub_scales;
  const rk_tensor* sub_mins;
} rk_unpack_weight_args;
RK_API rk_status rk_unpack_weight(const rk_unpack_weight_args* args, rk_stream stream);

/* out = gate(x [..., k] * weight^T + bias) + residual, sums in float32 in ascending k (integer sums are exact), rounded
 * once to out's dtype. x has desc->dtype; bias [n] (optional) the same or fp32; out [..., n] the same or fp32; residual
 * (optional) out's shape and x's dtype. gate is RK_GATE_*: with one, out and residual are [..., n / 2]; RK_GATE_HALVES
 * needs n / 2 in multiples of 16 (RK_UNSUPPORTED otherwise). gating: the activation of a gate, zeros (SiLU) without
 * one. out may be residual. A row's bits depend on neither the other rows nor the number of threads.
 * keep_x: 1 where many rows are to be expected. With AMX a kind that quantizes x then leaves bf16 x as it is and rounds
 * the weight's elements to bf16, which is nearer to the exact product and, for many rows, faster; W8A8 does not where
 * its groups fill tiles (whole rows, 64 and more), nor W4A8 in groups of 128. Ignored elsewhere. */
typedef struct rk_linear_args {
  uint32_t struct_size;
  const rk_packed_desc* desc;
  const rk_tensor* x;
  const rk_tensor* packed;
  const rk_tensor* bias;
  const rk_tensor* out;
  const rk_tensor* residual;
  int32_t gate;
  rk_gating gating;
  int32_t keep_x;
} rk_linear_args;
RK_API rk_status rk_linear(const rk_linear_args* args, rk_stream stream);

/* ids[t] = the output with the largest sum of x[t] * weight^T, the lowest one on ties; maxima[t] = that sum, with the
 * bits that rk_linear gives in fp32 without bias. A row with a NaN or +inf among its sums, or with nothing but -inf,
 * has id -1 and maximum NaN. x [T, k] as rk_linear; ids int32 [T], maxima fp32 [T]. No more than 2^28 outputs
 * (RK_UNSUPPORTED). */
typedef struct rk_linear_argmax_args {
  uint32_t struct_size;
  const rk_packed_desc* desc;
  const rk_tensor* x;
  const rk_tensor* packed;
  const rk_tensor* ids;
  const rk_tensor* maxima;
} rk_linear_argmax_args;
RK_API rk_status rk_linear_argmax(const rk_linear_argmax_args* args, rk_stream stream);

/* out [T, k] = row ids[t] of the packed weight: bits copied when dense, else (code - zero) * scale + minimum in
 * float32, rounded once to desc->dtype. ids int32 or int64 [T]; on the CPU an id outside [0, n) is RK_INVALID and
 * nothing is written, on a GPU its row is NaN. ids NULL: all rows in order, out [n, k] (on the CPU RK_UNSUPPORTED). */
typedef struct rk_embedding_args {
  uint32_t struct_size;
  const rk_packed_desc* desc;
  const rk_tensor* ids;
  const rk_tensor* packed;
  const rk_tensor* out;
} rk_embedding_args;
RK_API rk_status rk_embedding(const rk_embedding_args* args, rk_stream stream);

#endif
