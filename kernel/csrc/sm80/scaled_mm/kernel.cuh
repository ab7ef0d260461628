// The kernel: CUTLASS's main loop (cp.async into swizzled shared memory, ldmatrix, mma.sync) and an epilogue of ours.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/threadblock/default_mma.h>

#include "gpu/device/fp8.h"
#include "gpu/device/launch.h"
#include "sm80/scaled_mm/epilogue.cuh"

namespace radix::scaled_mm {

// A block's tile of tokens x weight rows, the same of one of its warps, and how many slices of `kDepth` bytes of k are
// in flight or in use.
template <int kTokens_, int kRows_, int kDepth_, int kWarpTokens_, int kWarpRows_, int kStages_>
struct MmaTile {
  static constexpr int kTokens = kTokens_, kRows = kRows_, kDepth = kDepth_, kStages = kStages_;
  static constexpr int kWarpTokens = kWarpTokens_, kWarpRows = kWarpRows_;
  static constexpr int kTokenWarps = kTokens / kWarpTokens, kRowWarps = kRows / kWarpRows;
  static constexpr int kThreads = kTokenWarps * kRowWarps * 32;
  static_assert(kTokens % kWarpTokens == 0 && kRows % kWarpRows == 0, "warps share out the tile");
  static_assert(kWarpTokens % kMmaRows == 0 && kWarpRows % kMmaColumns == 0, "whole instructions");
};

// CUTLASS's words for an operand. Sums of INT8 that reach the ends of int32 were refused; it has no other product of
// it.
template <class In>
struct OperandOf;
template <>
struct OperandOf<int8_t> {
  using Element = int8_t;
  using Sum = int32_t;
  using Arch = cutlass::arch::Sm80;
  using Product = cutlass::arch::OpMultiplyAddSaturate;
};
// With this product CUTLASS adds the tensor cores' sums, which keep fewer bits, to float32 ones once each slice of k.
template <>
struct OperandOf<e4m3> {
  using Element = cutlass::float_e4m3_t;
  using Sum = float;
  using Arch = cutlass::arch::Sm89;
  using Product = cutlass::arch::OpMultiplyAdd;
};

template <class In, class Tile>
using MainLoop = typename cutlass::gemm::threadblock::DefaultMma<
    typename OperandOf<In>::Element, cutlass::layout::RowMajor, 16, typename OperandOf<In>::Element,
    cutlass::layout::ColumnMajor, 16, typename OperandOf<In>::Sum, cutlass::layout::RowMajor,
    cutlass::arch::OpClassTensorOp, typename OperandOf<In>::Arch,
    cutlass::gemm::GemmShape<Tile::kTokens, Tile::kRows, Tile::kDepth>,
    cutlass::gemm::GemmShape<Tile::kWarpTokens, Tile::kWarpRows, Tile::kDepth>, cutlass::gemm::GemmShape<16, 8, 32>,
    Tile::kStages, typename OperandOf<In>::Product>::ThreadblockMma;

// What a block of every chip from sm_80 on may have (sm_86 and sm_89 have the least).
constexpr int kMaxSharedBytes = 99 << 10;

// Blocks go through the tiles in bands of so many tiles of tokens, so that those at work share rows of the weight.
constexpr int kBand = 8;

template <class In, class Tile>
__global__ void __launch_bounds__(Tile::kThreads) scaled_mm_kernel(Problem q) {
  using Loop = MainLoop<In, Tile>;
  using Warp = typename Loop::Operator;
  static_assert(Loop::Base::WarpCount::kM == Tile::kTokenWarps && Loop::Base::WarpCount::kK == 1, "no shares of k");
  static_assert(Loop::FragmentC::kElements == Warp::MmaIterations::kCount * 4, "what the epilogue takes apart");
  extern __shared__ __align__(128) char shared[];

  const int token_tiles = (q.m + Tile::kTokens - 1) / Tile::kTokens, row_tiles = (q.n + Tile::kRows - 1) / Tile::kRows;
  const int band = blockIdx.x / (kBand * row_tiles), within = blockIdx.x % (kBand * row_tiles);
  const int height = min(kBand, token_tiles - band * kBand);
  const int token = (band * kBand + within % height) * Tile::kTokens, row = within / height * Tile::kRows;

  typename Loop::IteratorA x(typename Loop::IteratorA::Layout(q.x_step),
                             reinterpret_cast<typename Loop::IteratorA::Pointer>(const_cast<char*>(q.x)), {q.m, q.k},
                             threadIdx.x, {token, 0});
  typename Loop::IteratorB weight(typename Loop::IteratorB::Layout(q.weight_step),
                                  reinterpret_cast<typename Loop::IteratorB::Pointer>(const_cast<char*>(q.weight)),
                                  {q.k, q.n}, threadIdx.x, {0, row});
  // The same in all lanes, which the compiler does not see by itself.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  Loop loop(*reinterpret_cast<typename Loop::SharedStorage*>(shared), threadIdx.x, warp, lane);
  typename Loop::FragmentC sums;
  sums.clear();
  loop((q.k + Tile::kDepth - 1) / Tile::kDepth, sums, x, weight, sums);

  finish_warp<Warp::MmaIterations::kRow, Warp::MmaIterations::kColumn>(
      q.epilogue, sums.data(), token + warp % Tile::kTokenWarps * Tile::kWarpTokens,
      row + warp / Tile::kTokenWarps * Tile::kWarpRows, q.m, q.n, lane);
}

// Not launch_dependent(): of this code a newer chip runs the PTX of an older one, which cannot wait for the kernel
// ahead.
template <class In, class Tile>
void launch(Problem q) {
  constexpr int kSharedBytes = sizeof(typename MainLoop<In, Tile>::SharedStorage);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  const auto kernel = scaled_mm_kernel<In, Tile>;
  const gpu::DeviceScope scope(q.device);
  gpu::raise_kernel_attribute(q.op, q.device, kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  const int64_t token_tiles = (q.m + Tile::kTokens - 1) / Tile::kTokens;
  const int64_t tiles = token_tiles * ((q.n + Tile::kRows - 1) / Tile::kRows);
  if (tiles > INT32_MAX)
    fail(RK_UNSUPPORTED, "%s: %d x %d results are more than a launch has blocks for", q.op, q.m, q.n);
  void* arguments[] = {&q};
  gpu::check_gpu(
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(tiles)), dim3(Tile::kThreads),
                       arguments, kSharedBytes, reinterpret_cast<cudaStream_t>(q.stream)),
      q.op);
}

}  // namespace radix::scaled_mm
