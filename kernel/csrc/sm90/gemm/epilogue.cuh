// What happens to a sum before it becomes one element of the result, for every kernel of the family:
//
//   v = sum * scale_x[token] * scale_w[row] + bias[row];  v = silu(v_gate) * v_up;  out = round(v + residual)
//
// each part optional, nothing rounded in between; `out` is of the kernel's type or, unrounded, float32. Sums of INT8
// operands are int32, exact; what x's zero points add to them is taken off before they become float32.
#pragma once

#include "common/tensor.h"
#include "gpu/device/element.h"
#include "sm90/common/convert.cuh"
#include "sm90/common/wgmma.cuh"

namespace radix::gemm {

// How rows of the weight pair up for SiLU-and-mul.
enum class Gate : int {
  none,
  halves,      // gate rows, then up rows
  interleaved  // gate row 2j, up row 2j + 1
};

struct Epilogue {
  char* out = nullptr;       // [m, n] of the output type, or float32
  int64_t out_step = 0;      // elements between tokens
  bool out_aligned = false;  // rows begin at multiples of 16 bytes
  bool out_float = false;
  const char* residual = nullptr;
  int64_t residual_step = 0;
  const char* bias = nullptr;  // [weight rows]
  bool bias_float = false;
  const float* scale_x = nullptr;  // [m] or one (step 0), or null with scale_w
  const float* scale_w = nullptr;  // [weight rows] or one
  int64_t scale_x_step = 0, scale_w_step = 0;
  Gate gate = Gate::none;
};

// Zero points of INT8 x: sum - x[token] * weight_sums[row]. Not of gated products.
struct ZeroPoints {
  const int32_t* x = nullptr;            // [m] or one (step 0), or null
  const int32_t* weight_sums = nullptr;  // [weight rows]: the sums of their codes
  int64_t x_step = 0;
};

// What a kernel is passed: of INT8 operands zero points too.
template <class Params>
struct WithZeroPoints : Params {
  ZeroPoints zeros;
};
template <sm90::Operand kType, class Params>
using ParamsOf = std::conditional_t<kType == sm90::Operand::s8, WithZeroPoints<Params>, Params>;

__device__ inline int32_t zero_point(const ZeroPoints& zeros, int token) {
  return zeros.x ? zeros.x[token * zeros.x_step] : 0;
}

// Sums pass through shared memory as words of float32, whatever they are.
__device__ inline float word_of(float sum) {
  return sum;
}
__device__ inline float word_of(int32_t sum) {
  return __int_as_float(sum);
}
template <class Sum>
__device__ inline Sum sum_of(float word) {
  if constexpr (__is_same(Sum, float)) {
    return word;
  } else {
    return __float_as_int(word);
  }
}

__device__ inline float silu(float x) {
  return x / (1.f + __expf(-x));
}

template <class Out>
__device__ inline float bias_of(const Epilogue& e, int row) {
  return e.bias_float ? reinterpret_cast<const float*>(e.bias)[row]
                      : gpu::to_float(reinterpret_cast<const Out*>(e.bias)[row]);
}
__device__ inline float token_scale(const Epilogue& e, int token) {
  return e.scale_x[token * e.scale_x_step];
}
// Scales and bias of one sum.
template <class Out>
__device__ inline float finish_sum(const Epilogue& e, float sum, int token, int row) {
  if (e.scale_x) sum *= token_scale(e, token) * e.scale_w[row * e.scale_w_step];
  return e.bias ? sum + bias_of<Out>(e, row) : sum;
}

// The bias of 8 rows of the weight, `row_step` apart, of which `count` exist.
template <class Out>
__device__ inline void add_bias_eight(const Epilogue& e, float (&v)[8], int row, int row_step, int count) {
  const auto at = [&](int j) { return row + min(j, count - 1) * row_step; };
  if (e.bias && e.bias_float) {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] += reinterpret_cast<const float*>(e.bias)[at(j)];
  } else if (e.bias) {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] += gpu::to_float(reinterpret_cast<const Out*>(e.bias)[at(j)]);
  }
}
// Their scales, and the bias.
template <class Out>
__device__ inline void finish_eight(const Epilogue& e, float (&v)[8], int token, int row, int row_step, int count) {
  if (e.scale_x) {
    const float scale = token_scale(e, token);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] *= scale * e.scale_w[(row + min(j, count - 1) * row_step) * e.scale_w_step];
  }
  add_bias_eight<Out>(e, v, row, row_step, count);
}

template <class Out>
__device__ inline float residual(const Epilogue& e, int64_t token, int column) {
  return gpu::to_float(reinterpret_cast<const Out*>(e.residual)[token * e.residual_step + column]);
}

using sm90::round_pair;

// The inverse of round_pair.
template <class Out>
__device__ inline float2 unpack_pair(uint32_t word) {
  Out low, high;
  low.bits = static_cast<uint16_t>(word);
  high.bits = static_cast<uint16_t>(word >> 16);
  return make_float2(gpu::to_float(low), gpu::to_float(high));
}

// `count` of 8 neighbouring results of a token, `row` of the result; column is a multiple of 8.
template <class Out>
__device__ inline void store_eight(const Epilogue& e, float (&v)[8], int64_t row, int column, int count) {
  if (e.residual) {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j < count) v[j] += residual<Out>(e, row, column + j);
  }
  if (e.out_float) {
    float* to = reinterpret_cast<float*>(e.out) + row * e.out_step + column;
    if (e.out_aligned && count == 8) {
      reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
      reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j < count) to[j] = v[j];
    }
    return;
  }
  Out* to = reinterpret_cast<Out*>(e.out) + row * e.out_step + column;
  const uint32_t words[4] = {round_pair<Out>(v[0], v[1]), round_pair<Out>(v[2], v[3]), round_pair<Out>(v[4], v[5]),
                             round_pair<Out>(v[6], v[7])};
  if (e.out_aligned && count == 8) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j < count) to[j].bits = static_cast<uint16_t>(words[j / 2] >> j % 2 * 16);
  }
}

// Whether rows of `columns` results, their residual and their bias, whose elements stand `step` apart, are whole pieces
// of 8 that begin at multiples of 16 bytes.
__device__ inline bool takes_eight(const Epilogue& e, int step, int columns) {
  const auto aligned = [](const char* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return columns % 8 == 0 && e.out_aligned && aligned(e.residual) && e.residual_step % 8 == 0 &&
         (!e.bias || (step == 1 && aligned(e.bias)));
}

// Adds 8 neighbours of the kernel's type.
template <class Out>
__device__ inline void add_eight(float (&v)[8], const void* from) {
  const uint4 more = *static_cast<const uint4*>(from);
  const uint32_t words[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float2 pair = unpack_pair<Out>(words[j]);
    v[2 * j] += pair.x;
    v[2 * j + 1] += pair.y;
  }
}

// Scales and bias of 8 rows of the weight, `step` apart, where takes_eight().
template <class Out>
class EightRows {
 public:
  __device__ EightRows(const Epilogue& e, int row, int step) : e_(e), row_(row) {
    if (e.scale_x) {
#pragma unroll
      for (int j = 0; j < 8; j++) scale_[j] = e.scale_w[(row + j * step) * e.scale_w_step];
    }
  }
  // The sums of a token, whose scale is given.
  __device__ void finish(float (&v)[8], float token_scale) const {
    if (e_.scale_x) {
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] *= token_scale * scale_[j];
    }
    if (!e_.bias) return;
    if (e_.bias_float) {
      const float4* from = reinterpret_cast<const float4*>(reinterpret_cast<const float*>(e_.bias) + row_);
#pragma unroll
      for (int h = 0; h < 2; h++)
        v[4 * h] += from[h].x, v[4 * h + 1] += from[h].y, v[4 * h + 2] += from[h].z, v[4 * h + 3] += from[h].w;
    } else {
      add_eight<Out>(v, reinterpret_cast<const Out*>(e_.bias) + row_);
    }
  }

 private:
  const Epilogue& e_;
  const int row_;
  float scale_[8];
};

// The residual's 8 neighbours where takes_eight().
__device__ inline uint4 residual_eight(const Epilogue& e, int64_t row, int column) {
  return *reinterpret_cast<const uint4*>(e.residual + (row * e.residual_step + column) * 2);
}

// 8 neighbouring results of a token, `row` of the result, where takes_eight().
template <class Out>
__device__ inline void store_sums(const Epilogue& e, const float (&v)[8], int64_t row, int column) {
  const int64_t at = row * e.out_step + column;
  if (e.out_float) {
    float4* to = reinterpret_cast<float4*>(reinterpret_cast<float*>(e.out) + at);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    *reinterpret_cast<uint4*>(reinterpret_cast<Out*>(e.out) + at) =
        make_uint4(round_pair<Out>(v[0], v[1]), round_pair<Out>(v[2], v[3]), round_pair<Out>(v[4], v[5]),
                   round_pair<Out>(v[6], v[7]));
  }
}
// The same, with the residual.
template <class Out>
__device__ inline void store_whole(const Epilogue& e, float (&v)[8], int64_t row, int column) {
  if (e.residual) add_eight<Out>(v, reinterpret_cast<const Out*>(e.residual) + row * e.residual_step + column);
  store_sums<Out>(e, v, row, column);
}

// One result.
template <class Out>
__device__ inline void store_result(const Epilogue& e, float value, int64_t row, int column) {
  if (e.residual) value += residual<Out>(e, row, column);
  const int64_t at = row * e.out_step + column;
  if (e.out_float) {
    reinterpret_cast<float*>(e.out)[at] = value;
  } else {
    gpu::from_float(value, reinterpret_cast<Out*>(e.out)[at]);
  }
}

}  // namespace radix::gemm
