// One call of fused_experts over packed weights as the kernel's launcher takes it.
#pragma once

#include "sm90/experts/problem.cuh"
#include "sm90/linear/mixed_wgmma_pipeline.cuh"

namespace radix::experts {

// [experts, rows], or null; in float32, or of the activations' type.
struct MixedBias {
  const char* data;
  bool wide;
};

// limit 0: silu(gate) * up, alpha 1; else the clamped SwiGLU.
struct MixedActivation {
  float limit, alpha;
};

// grouped_mixed_mma takes up to so many pairs, and so many of an expert in the mean; grouped_mixed takes the rest.
constexpr int kMixedMmaPairs = 1024, kMixedMmaPairsOfExpert = 8;

struct MixedProblem {
  Problem q;                    // but for its weights
  linear::MixedWeights w1, w2;  // of all experts, one after the other; w1: gate rows, then up rows
  MixedBias bias1, bias2;
  MixedActivation activation;

  bool takes_mixed_mma() const {
    const bool few = q.pairs() <= kMixedMmaPairs && q.pairs() <= kMixedMmaPairsOfExpert * q.routing.named;
    return few && w1.step <= UINT32_MAX && w2.step <= UINT32_MAX;
  }
};

template <class T, linear::Code kCode, int kGroup>
void grouped_mixed(const MixedProblem& problem, const Scratch& scratch);
template <class T, linear::Code kCode, int kGroup>
void grouped_mixed_mma(const MixedProblem& problem, const Scratch& scratch);

}  // namespace radix::experts
