// A product as the kernels of every chip take it: x [m, k] * weight [n, k]^T of operands of one byte, with scales.
#pragma once

#include <cstdint>

#include "radix_kernels/types.h"

namespace radix::scaled_mm {

// What becomes of a sum before it is an element of the result:
//
//   out = round((sum - zeros[token] * weight_sums[row]) * (scale_x[token] * scale_w[row]) + bias[row])
//
// Steps are in elements; one value for all tokens or rows has a step of 0.
struct Epilogue {
  char* out;         // [m, n] bf16 or f16; rows begin at multiples of 16 bytes
  int64_t out_step;  // between tokens
  bool out_is_f16;
  const char* bias;  // [n] of the result's type or float32, or null
  bool bias_is_float;
  const float *scale_x, *scale_w;
  int64_t scale_x_step, scale_w_step;
  const int32_t *zeros, *weight_sums;  // of INT8 with zero points, else null
  int64_t zeros_step;
};

struct Problem {
  const char* op;
  rk_device device;
  rk_stream stream;
  const char *x, *weight;       // rows of k bytes, at multiples of 16 bytes
  int64_t x_step, weight_step;  // bytes between rows
  int m, n, k;                  // n and k are multiples of 16
  Epilogue epilogue;
};

void run_int8(const Problem& problem);       // int8.cu, for sm_80 and later
void run_fp8(const Problem& problem);        // fp8.cu, e4m3, for sm_89 and later
void run_fp8_sm100(const Problem& problem);  // sm100/scaled_mm/fp8.cu, e4m3, for sm_100 alone

}  // namespace radix::scaled_mm
