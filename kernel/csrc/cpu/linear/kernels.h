// The linear kernels of one ISA level.
#pragma once

#include "cpu/isa.h"
#include "cpu/linear/layout.h"
#include "radix_kernels/linear.h"

namespace radix::cpu {

// The largest sum of a row in each lane of its blocks, and the first block that has it. A NaN counts as +inf: neither
// leaves a row a choice.
struct alignas(64) LaneMaxima {
  float value[linear_layout::kBlockN], block[linear_layout::kBlockN];
};

// Where products leave the maxima of their rows instead of outputs. A thread claims rows of its own: which, depends on
// who comes first, and the blocks that it meets on how fast it is, so what is made of them must depend on neither.
struct RowMaxima {
  LaneMaxima* parts;  // [most][m]
  int64_t most;       // threads that there may be
  int64_t claimed;    // by as many threads so far, or asked for in vain
};

// What a thread should have to do at least.
constexpr int64_t kLeastTaskNs = 10000;

// What a product takes on one thread, roughly: of packed weights of so many bytes with rows of x.
constexpr int64_t product_ns(int64_t weight_bytes, int64_t rows, int64_t outputs, int64_t inputs) {
  const int64_t reading = weight_bytes / 16, multiplying = rows * outputs * inputs / 64;
  return reading > multiplying ? reading : multiplying;
}

struct LinearKernels {
  // `count` products, 1 or more, none of which reads what another writes. maxima: NULL, or what takes the place of the
  // output of a single one, which is NULL then; without bias, gate and residual.
  void (*products)(const rk_linear_args* args, int64_t count, RowMaxima* maxima);
  // Whether rk_linear_args::keep_x has an effect on a product of a weight and x of a dtype.
  bool (*keeps_x)(const rk_packed_desc& desc, DType x);
  // Of kinds other than dense.
  void (*pack_quantized)(const rk_pack_weight_args& args);
  void (*unpack_quantized)(const rk_unpack_weight_args& args);
  void (*gather_quantized)(const rk_embedding_args& args);
};

RK_CPU_TABLE(LinearKernels, linear)

}  // namespace radix::cpu
