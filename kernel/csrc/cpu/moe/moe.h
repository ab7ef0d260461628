// CPU moe family: what the backend (moe.cpp) hands to the kernels (route.cpp, once per ISA level).
#pragma once

#include "common/tensor.h"
#include "cpu/isa.h"

namespace radix::cpu {

struct RouteTask {
  const char* logits;
  int64_t stride;  // in bytes
  int64_t experts, topk;
  DType dtype;
  bool sigmoid;  // else softmax
  bool renormalize;
  const float* bias;     // sigmoid only, may be NULL
  int64_t groups, kept;  // groups of 1: all stay
  float scale;           // of the weights
  int64_t shared;        // columns behind topk: experts that every token goes to
  float* weights;
  int32_t* ids;
};

// Strides in bytes. With `places` [tokens][topk] a row stands at places[t][k] * expert_stride, -1: it adds nothing, and
// is multiplied by weights[t][k].
struct SumTask {
  const char* input;
  char* out;
  int64_t token_stride, expert_stride, out_stride, topk, hidden;
  DType dtype;
  const float* weights = nullptr;
  const int32_t* places = nullptr;
};

struct MoeKernels {
  void (*route)(const RouteTask& task, int64_t begin, int64_t end);  // tokens
  void (*sum)(const SumTask& task, int64_t begin, int64_t end);      // tokens
};
RK_CPU_TABLE(MoeKernels, moe)

}  // namespace radix::cpu
