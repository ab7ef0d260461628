// The register operand of products on wgmma from packed codes: of one group, both of this lane's rows, times its scale.
#pragma once

#include "sm90/common/shared_memory.cuh"
#include "sm90/linear/scales.cuh"
#include "sm90/linear/widen.cuh"

namespace radix::linear {

// The scale `row` rows behind an address in shared memory, in float32.
template <Code kCode>
__device__ inline float load_scale(uint32_t from, int row, DType type) {
  if constexpr (kCode == Code::e2m1) return power_of_two(sm90::load_shared_u8(from + row));
  if (type == DType::f32) return sm90::load_shared_float(from + row * 4);
  const uint16_t bits = sm90::load_shared_u16(from + row * 2);
  return type == DType::bf16 ? gpu::to_float(bf16{bits}) : gpu::to_float(f16{bits});
}

// Both halves of a * b + c.
template <class T>
__device__ inline uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (kIsBf16<T>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

// What the codes of a group become: counted from the zero points of the lane's two rows, 8 unless told, and multiplied
// by their scales, rounded to T once. Of scales in T that is a product of two numbers of T. An f16 scale is two numbers
// of bf16, whose product with a code of four bits is exact for the smaller one. Others meet the code in float32.
template <class T, Code kCode>
class ScaledOperands {
 public:
  // The scales of the row at `from` and of that 8 further on.
  __device__ void scale_by(uint32_t from, DType type) {
    is_own_ = kCode != Code::e2m1 && type == (kIsBf16<T> ? DType::bf16 : DType::f16);
    is_split_ = kSplits && type == DType::f16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (is_own_) {
        scale_[i] = twice(sm90::load_shared_u16(from + 16 * i));
        continue;
      }
      const float scale = load_scale<kCode>(from, 8 * i, type);
      scale_[i] = __float_as_uint(scale);
      if (is_split_) {
        const float most = __uint_as_float(sm90::round_pair<T>(scale, scale) & 0xffff0000u);
        scale_[i] = sm90::round_pair<T>(most, scale - most);
      }
    }
  }
  __device__ void count_from(uint32_t low, uint32_t high) {
    zero_[0] = zero_pair<T>(low);
    zero_[1] = zero_pair<T>(high);
  }
  // kSteps steps of words.
  template <int kSteps>
  __device__ void widen(const uint32_t (*words)[kStepWords<kCode>], uint32_t (*a)[4]) const {
#pragma unroll
    for (int s = 0; s < kSteps; s++) widen_step<T, kCode>(words[s], zero_, a[s]);
    const auto each = [&](const auto& scaled) {
#pragma unroll
      for (int i = 0; i < kSteps * 4; i++) a[i / 4][i % 4] = scaled(a[i / 4][i % 4], i % 2);
    };
    if (is_own_) {
      each([&](uint32_t pair, int row) { return multiply_pair<T>(pair, scale_[row]); });
    } else if (is_split_) {
      each([&](uint32_t pair, int row) {
        const uint32_t most = __byte_perm(scale_[row], 0, 0x1010), rest = __byte_perm(scale_[row], 0, 0x3232);
        return multiply_add_pair<T>(pair, most, multiply_pair<T>(pair, rest));
      });
    } else {
      each([&](uint32_t pair, int row) { return scaled_pair<T>(pair, __uint_as_float(scale_[row])); });
    }
  }

 private:
  static constexpr bool kSplits = kIsBf16<T> && kCode == Code::u4;

  bool is_own_, is_split_;
  uint32_t scale_[2];  // twice one of T; two numbers of T; or a float32
  uint32_t zero_[2] = {zero_pair<T>(8), zero_pair<T>(8)};
};

// MXFP4 in bf16, with the group's power of two, exactly. It goes into the product that corrects the exponent, as far as
// bf16 holds that factor; what is left of a large one, into a second.
class ScaledE2m1Operands {
 public:
  // Powers of two in e8m0, 0 .. 252, in shared memory as above.
  __device__ void scale_by(uint32_t from, DType) {
    const uint32_t low = sm90::load_shared_u8(from), high = sm90::load_shared_u8(from + 8);
    scale_by(low, high, __any_sync(~0u, max(low, high) > kMostAtOnce));
  }
  // is_large: the same for the warp, and true where one is above kMostAtOnce.
  __device__ void scale_by(uint32_t low, uint32_t high, bool is_large) {
    factor_[0] = factor(low);
    factor_[1] = factor(high);
    large_ = is_large;
    if (!large_) return;
    factor_[0] = factor(min(low, kMostAtOnce));
    factor_[1] = factor(min(high, kMostAtOnce));
    rest_[0] = rest(max(low, kMostAtOnce));
    rest_[1] = rest(max(high, kMostAtOnce));
  }
  template <int kSteps>
  __device__ void widen(const uint32_t (*words)[1], uint32_t (*a)[4]) const {
#pragma unroll
    for (int s = 0; s < kSteps; s++) widen_scaled_e2m1(words[s][0], factor_, a[s]);
    if (!large_) return;
#pragma unroll
    for (int i = 0; i < kSteps * 4; i++) a[i / 4][i % 4] = multiply_pair<bf16>(a[i / 4][i % 4], rest_[i % 2]);
  }

  // As bf16 2^(126 + code - 127) has 126 + code as its exponent's field, up to 254.
  static constexpr uint32_t kMostAtOnce = 128;

 private:
  static constexpr uint32_t kExponent = twice(1 << 7);
  __device__ static uint32_t factor(uint32_t code) { return code * kExponent + 126 * kExponent; }
  __device__ static uint32_t rest(uint32_t code) { return (code - 1) * kExponent; }

  uint32_t factor_[2], rest_[2];
  bool large_;
};

template <class T, Code kCode>
using GroupOperands =
    std::conditional_t<kCode == Code::e2m1 && kIsBf16<T>, ScaledE2m1Operands, ScaledOperands<T, kCode>>;

}  // namespace radix::linear
