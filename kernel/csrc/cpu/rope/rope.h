// CPU rope family: what the backend (rope.cpp) hands to the kernel (rotate.cpp, once per ISA level).
#pragma once

#include "common/tensor.h"
#include "cpu/isa.h"

namespace radix::cpu {

// The heads of query or key; strides in bytes.
struct RopeHeads {
  char* data = nullptr;
  int64_t heads = 0, token_stride = 0, head_stride = 0;
};

struct RopeTask {
  Indices positions;
  const float* cache;
  int64_t cache_stride;  // in elements
  int64_t rotary_dim;
  DType dtype;
  bool neox;
  RopeHeads query, key;
};

struct RopeKernels {
  void (*rotate)(const RopeTask& task, int64_t begin, int64_t end);  // tokens
};
RK_CPU_TABLE(RopeKernels, rope)

}  // namespace radix::cpu
