// CPU sampling family: the passes over a row of logits (passes.cpp, once per ISA level) that the backend is made of.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace radix::cpu {

struct SamplingKernels {
  // The largest of x[0, n), -inf for n 0; NaN when x holds one.
  float (*max)(const float* x, int64_t n);
  // out = x / divisor; out may be x.
  void (*divide)(const float* x, float divisor, float* out, int64_t n);
  // Sum of exp(x - shift) in float64 over blocks summed in float32.
  double (*sum_exp)(const float* x, float shift, int64_t n);
};
RK_CPU_TABLE(SamplingKernels, sampling)

// Log-softmax of a row at id (negative: NaN) and of its top_n largest.
void row_logprobs(const float* x, int64_t n, int32_t id, int64_t top_n, float* logprob, float* top_logprobs,
                  int32_t* top_ids);

}  // namespace radix::cpu
