// What the family's kernels are handed, and their launchers.
#pragma once

#include "common/tensor.h"
#include "gpu/device/launch.h"
#include "sm90/gemm/problem.cuh"
#include "sm90/linear/layout.cuh"
#include "sm90/linear/mixed_plan.cuh"

namespace radix::linear {

// One product: `gemm` is of x [m, k], n rows of the weight, and what becomes of the sums.
struct Problem {
  gemm::Problem gemm;
  Layout layout;
  DType scale_type;
  const char* packed;
};

// What the plan asks of it.
inline PlannedWeight planned(const Problem& q) {
  PlannedWeight w = {};
  w.rows = q.gemm.n;
  w.k_tiles = static_cast<int>(q.layout.k_tiles);
  w.halves = q.gemm.epilogue.gate == gemm::Gate::halves;
  w.long_groups = q.layout.groups == 1 || q.layout.group == 128;
  w.tile_bytes = tile_bytes(q.layout.code);
  w.multiprocessors = gpu::multiprocessors(q.gemm.device);
  return w;
}

// The product of up to kFewTokens tokens; kGroup 128 also for whole rows.
template <class T, Code kCode, int kGroup>
void mixed_mma(const Problem& problem);
// Of 17 tokens and more; which of the two runs: takes_wgmma.
template <class T, Code kCode, int kGroup>
void mixed_wgmma(const Problem& problem);

// Between the packed form and codes, scales and zero points as they came.
void pack(const Layout& layout, const rk_pack_weight_args& args, rk_stream stream);
void unpack(const Layout& layout, const rk_unpack_weight_args& args, rk_stream stream);

// out [T, k] = rows `ids` of the weight, or all of its rows.
void widen_rows(const Layout& layout, const rk_embedding_args& args, rk_stream stream);

}  // namespace radix::linear
