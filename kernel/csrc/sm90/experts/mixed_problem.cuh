// One call of fused_experts over packed weights as the kernel's launcher takes it.
#pragma once

#include "sm90/experts/problem.cuh"
#include "sm90/linear/layout.cuh"

namespace radix::experts {

// The packed weights of all experts, one after the other.
struct MixedWeights {
  const char *codes, *scales, *zeros;  // of the first expert; zeros: or null
  int64_t expert_bytes;                // from one expert to the next
  int row_tiles, k_tiles, groups;      // of 64 rows, 64 of k; groups along k
  int scale_bytes;                     // of one scale
};

// [experts, rows], or null; in float32, or of the activations' type.
struct MixedBias {
  const char* data;
  bool wide;
};

// limit 0: silu(gate) * up, alpha 1; else the clamped SwiGLU.
struct MixedActivation {
  float limit, alpha;
};

struct MixedProblem {
  Problem q;            // but for its weights
  MixedWeights w1, w2;  // w1: gate rows, then up rows
  DType scale_type;
  MixedBias bias1, bias2;
  MixedActivation activation;
};

template <class T, linear::Code kCode, int kGroup>
void grouped_mixed(const MixedProblem& problem, const Scratch& scratch);

}  // namespace radix::experts
