// The register operand of products on wgmma from packed codes: of one group, both of this lane's rows.
#pragma once

#include "gpu/device/element.h"
#include "sm90/common/shared_memory.cuh"
#include "sm90/linear/widen.cuh"

namespace radix::linear {

// The scale at `index` from an address in shared memory, in float32.
template <Code kCode>
__device__ inline float load_scale(uint32_t from, int index, DType type) {
  if constexpr (kCode == Code::e2m1) return power_of_two(sm90::load_shared_u8(from + index));
  if (type == DType::f32) return sm90::load_shared_float(from + index * 4);
  const uint16_t bits = sm90::load_shared_u16(from + index * 2);
  return type == DType::bf16 ? gpu::to_float(bf16{bits}) : gpu::to_float(f16{bits});
}

// What the codes of a group become, counted from the zero points of the lane's two rows: 8 unless told.
template <class T, Code kCode>
class GroupOperands {
 public:
  __device__ void count_from(uint32_t low, uint32_t high) {
    zero_[0] = zero_pair<T>(low);
    zero_[1] = zero_pair<T>(high);
  }
  __device__ void widen(const uint32_t (&words)[kStepWords<kCode>], uint32_t (&a)[4]) const {
    widen_step<T, kCode>(words, zero_, a);
  }

 private:
  uint32_t zero_[2] = {zero_pair<T>(8), zero_pair<T>(8)};
};

// MXFP4 in bf16, with the group's power of two. It goes into the product that corrects the exponent, as far as bf16
// holds that factor; what is left of a large one, into a second.
class ScaledE2m1Operands {
 public:
  // Powers of two in e8m0, 0 .. 252.
  __device__ void scale_by(uint32_t low, uint32_t high) {
    factor_[0] = factor(low);
    factor_[1] = factor(high);
    large_ = __any_sync(~0u, max(low, high) > kMostAtOnce);
    if (!large_) return;
    factor_[0] = factor(min(low, kMostAtOnce));
    factor_[1] = factor(min(high, kMostAtOnce));
    rest_[0] = rest(max(low, kMostAtOnce));
    rest_[1] = rest(max(high, kMostAtOnce));
  }
  __device__ void widen(const uint32_t (&words)[1], uint32_t (&a)[4]) const {
    widen_scaled_e2m1(words[0], factor_, a);
    if (!large_) return;
#pragma unroll
    for (int j = 0; j < 4; j++) a[j] = multiply_pair<bf16>(a[j], rest_[j % 2]);
  }

 private:
  // As bf16 2^(126 + code - 127) has 126 + code as its exponent's field, up to 254.
  static constexpr uint32_t kMostAtOnce = 128, kExponent = twice(1 << 7);
  __device__ static uint32_t factor(uint32_t code) { return code * kExponent + 126 * kExponent; }
  __device__ static uint32_t rest(uint32_t code) { return (code - 1) * kExponent; }

  uint32_t factor_[2], rest_[2];
  bool large_;
};

}  // namespace radix::linear
