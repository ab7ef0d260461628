// CPU fused_rope family: what the backend (fused_rope.cpp) hands to the kernel (heads.cpp, once per ISA level).
#pragma once

#include "common/tensor.h"
#include "cpu/isa.h"

namespace radix::cpu {

// Strides in bytes.
struct TokenHeads {
  char* data = nullptr;
  int64_t token = 0, head = 0;
};
struct CacheHeads {
  char* data = nullptr;
  int64_t page = 0, slot = 0, head = 0;
};

struct FusedRopeTask {
  Indices positions, slots;
  TokenHeads q, k, v;
  CacheHeads k_cache, v_cache;
  CacheHeads k_scale, v_scale;      // float32, of an INT8 cache; data NULL: the caches are of q's dtype
  const void *q_weight, *k_weight;  // NULL: no norm
  const float* cos_sin;
  int64_t cos_sin_stride;  // in elements
  int64_t rotary_dim, dim, q_heads, kv_heads, page_size;
  DType dtype, weight_dtype;
  float eps;
  bool neox;
};

struct FusedRopeKernels {
  void (*run)(const FusedRopeTask& task, int64_t begin, int64_t end);  // tokens
};
RK_CPU_TABLE(FusedRopeKernels, fused_rope)

}  // namespace radix::cpu
