// One product as the kernels' launchers take it, and the launchers; each is instantiated in files of its own.
#pragma once

#include "cuda/gemm/epilogue.h"
#include "gpu/launch.h"
#include "radix_kernels/types.h"

namespace radix::gemm {

// `batch` matrices x [m, k] and weight [n, k]; results follow each other. Steps and strides in bytes.
struct Problem {
  const char* op;
  rk_device device;
  rk_stream stream;
  const char *x, *weight;
  int64_t x_step, weight_step, x_batch, weight_batch;
  int m, n, k, batch;
  DType type, out_type;  // of the operands: bf16, f16 or f8e4m3; of the result: bf16, f16 or (up to 64 tokens) f32
  bool static_weight;
  bool fast;                       // the tensor cores may add over all of k
  const float *block_x, *block_w;  // scales of blocks, or null; steps in elements
  int64_t block_x_step, block_x_unit, block_w_step;
  Epilogue epilogue;

  int element_size() const { return type == DType::f8e4m3 ? 1 : 2; }
  bool gated() const { return epilogue.gate != Gate::none; }
};

constexpr int kSkinnyTokens = 16, kNarrowTokens = 64;

using gpu::multiprocessors;

void skinny_bf16(const Problem& problem);
void skinny_f16(const Problem& problem);
void narrow_bf16(const Problem& problem);
void narrow_f16(const Problem& problem);
void narrow_fp8(const Problem& problem);
void wide_bf16(const Problem& problem);
void wide_f16(const Problem& problem);
// By the type of the result.
void wide_fp8_bf16(const Problem& problem);
void wide_fp8_f16(const Problem& problem);

}  // namespace radix::gemm
