// What the CPU implements for the packed experts. Arguments were checked by api/packed_experts.cpp.
#pragma once

#include "radix_kernels/packed_experts.h"

namespace radix {

// Where everything lies in the workspace: offsets in bytes.
struct PackedExpertsPlan {
  int64_t tokens, topk, hidden, inner, item;
  bool fused;  // gate, up and SiLU are one product
  int64_t rows, gated, gate_up, places, bytes;
};

namespace backend {

// memory: plan.bytes, on a cache line.
void fused_experts_packed(const rk_fused_experts_packed_args& args, const PackedExpertsPlan& plan, char* memory);

}  // namespace backend
}  // namespace radix
