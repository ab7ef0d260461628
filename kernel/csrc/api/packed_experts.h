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

// The size of a workspace for `tokens` rows of `hidden` elements of `item` bytes, topk experts of width `inner` each.
int64_t packed_experts_bytes(int64_t tokens, int64_t topk, int64_t hidden, int64_t inner, int64_t item);

namespace backend {

// memory: plan.bytes, on a cache line.
void fused_experts_packed(const rk_fused_experts_packed_args& args, const PackedExpertsPlan& plan, char* memory);

}  // namespace backend
}  // namespace radix
