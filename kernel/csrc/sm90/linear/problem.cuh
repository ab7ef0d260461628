// What the family's kernels are handed, and their launchers.
#pragma once

#include "common/tensor.h"
#include "gpu/device/launch.h"
#include "sm90/gemm/problem.cuh"
#include "sm90/linear/layout.cuh"

namespace radix::linear {

// One product: `gemm` is of x [m, k], n rows of the weight, and what becomes of the sums.
struct Problem {
  gemm::Problem gemm;
  Layout layout;
  DType scale_type;
  const char* packed;
};

constexpr int kFewTokens = 32;     // up to so many mixed_mma multiplies, above them mixed_wgmma
constexpr int kMostTokens = 1024;  // of a product with the packed weight itself

// The product of up to kFewTokens tokens; kGroup 128 also for whole rows.
template <class T, Code kCode, int kGroup>
void mixed_mma(const Problem& problem);
// And of more.
template <class T, Code kCode, int kGroup>
void mixed_wgmma(const Problem& problem);

// Between the packed form and codes, scales and zero points as they came.
void pack(const Layout& layout, const rk_pack_weight_args& args, rk_stream stream);
void unpack(const Layout& layout, const rk_unpack_weight_args& args, rk_stream stream);

// out [T, k] = rows `ids` of the weight, or all of its rows.
void widen_rows(const Layout& layout, const rk_embedding_args& args, rk_stream stream);

}  // namespace radix::linear
