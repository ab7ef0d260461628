// One product as the kernels' launchers take it, and the launchers.
#pragma once

#include "gpu/device/launch.h"
#include "radix_kernels/types.h"
#include "sm90/gemm/epilogue.cuh"

namespace radix::gemm {

// `batch` matrices x [m, k] and weight [n, k]; results follow each other. Steps and strides in bytes.
struct Problem {
  const char* op;
  rk_device device;
  rk_stream stream;
  const char *x, *weight;
  int64_t x_step, weight_step, x_batch, weight_batch;
  int m, n, k, batch;
  DType type, out_type;  // of the operands: bf16, f16, f8e4m3 or i8; of the result: bf16, f16 or (up to 64 tokens) f32
  bool static_weight;
  bool fast;                       // the tensor cores may add over all of k
  const float *block_x, *block_w;  // scales of blocks, or null; steps in elements
  int64_t block_x_step, block_x_unit, block_w_step;
  Epilogue epilogue;
  ZeroPoints zeros;  // of i8

  int element_size() const { return type == DType::f8e4m3 || type == DType::i8 ? 1 : 2; }
  bool gated() const { return epilogue.gate != Gate::none; }
};

template <class Params>
void set_zero_points(Params&, const Problem&) {}
template <class Params>
void set_zero_points(WithZeroPoints<Params>& p, const Problem& q) {
  p.zeros = q.zeros;
}

// What the parameters of the kernels on wgmma (wgmma_swap_ab.cuh, wgmma_persistent.cuh) say alike of a product.
template <class Params>
Params params_of(const Problem& q) {
  Params p = {};
  set_zero_points(p, q);
  p.m = q.m;
  p.n = q.n;
  p.chunks = (q.k * q.element_size() + 127) / 128;
  p.static_weight = q.static_weight;
  p.gated = q.gated();
  p.up_offset = q.epilogue.gate == Gate::halves ? q.n / 2 : 1;
  p.row_step = q.epilogue.gate == Gate::interleaved ? 2 : 1;
  p.block_x = q.block_x;
  p.block_w = q.block_w;
  p.block_x_step = q.block_x_step;
  p.block_x_unit = q.block_x_unit;
  p.block_w_step = q.block_w_step;
  p.epilogue = q.epilogue;
  return p;
}

constexpr int kMmaM16Tokens = 16;       // at most, of the kernel on mma.sync
constexpr int kSwapAbTokens = 64;       // and of the one on wgmma with the operands swapped
constexpr int kSwapAbManyTokens = 192;  // of that one with 16-bit operands, where it is ahead

using gpu::multiprocessors;

// The kernels' launchers; sources.cmake names the types that each is instantiated for.
template <class T>
void mma_m16(const Problem& problem);
template <class T>
void wgmma_swap_ab(const Problem& problem);
template <class T>
void wgmma_swap_ab_many(const Problem& problem, int share);
template <class In, class Out>
void wgmma_persistent(const Problem& problem);

}  // namespace radix::gemm
