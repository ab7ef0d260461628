// The register operand of products on wgmma from packed codes: of one group, both of this lane's rows, times its scale.
#pragma once

#include "sm90/common/shared_memory.cuh"
#include "sm90/linear/scales.cuh"
#include "sm90/linear/widen.cuh"

namespace radix::linear {

// Of the number at an address in shared memory (i: 0) or of that 8 rows further on (1), the scale of group `group` of
// those that share it, in float32.
template <Code kCode>
__device__ inline float load_scale(uint32_t from, int i, int group, DType type) {
  if constexpr (kCode == Code::e2m1) return power_of_two(sm90::load_shared_u8(from + i * 2 + group));
  if (type == DType::f32) return sm90::load_shared_float(from + i * 32);
  const uint16_t bits = sm90::load_shared_u16(from + i * 16);
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
  // The scales of the row at `from` and of that 8 further on, as load_scale() finds them.
  __device__ void scale_by(uint32_t from, int group, DType type) {
    is_own_ = kCode != Code::e2m1 && type == (kIsBf16<T> ? DType::bf16 : DType::f16);
    is_split_ = kSplits && type == DType::f16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (is_own_) {
        scale_[i] = twice(sm90::load_shared_u16(from + 16 * i));
        continue;
      }
      const float scale = load_scale<kCode>(from, i, group, type);
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
  // kPairs times two steps of words.
  template <int kPairs>
  __device__ void widen(const uint32_t (*words)[2][kStepWords<kCode>], uint32_t (*a)[2][4]) const {
#pragma unroll
    for (int p = 0; p < kPairs; p++) widen_steps<T, kCode>(words[p], zero_, a[p]);
    const auto each = [&](const auto& scaled) {
#pragma unroll
      for (int i = 0; i < kPairs * 8; i++) {
        uint32_t& pair = a[i / 8][i / 4 % 2][i % 4];
        pair = scaled(pair, i % 2);
      }
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
  // The numbers of the lane's rows, four powers of two in e8m0, 0 .. 252, are a word in shared memory.
  __device__ void scale_by(uint32_t from, int group, DType) {
    const uint32_t numbers = sm90::load_shared_u32(from);
    scale_by(numbers, group, __any_sync(~0u, is_large(numbers)));
  }
  // large: the same for the warp, and true where is_large() is for the lane.
  __device__ void scale_by(uint32_t numbers, int group, bool large) {
    large_ = large;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t power = e2m1_power(numbers, i, group), most = large ? min(power, kMostAtOnce) : power;
      factor_[i] = most * kExponent + 126 * kExponent;
      rest_[i] = (power - most) * kExponent + 127 * kExponent;
    }
  }
  // kPairs times two steps of words.
  template <int kPairs>
  __device__ void widen(const uint32_t (*words)[2][1], uint32_t (*a)[2][4]) const {
#pragma unroll
    for (int p = 0; p < kPairs; p++) widen_scaled_e2m1<bf16>({words[p][0][0], words[p][1][0]}, factor_, a[p]);
    if (!large_) return;
#pragma unroll
    for (int i = 0; i < kPairs * 8; i++) {
      uint32_t& pair = a[i / 8][i / 4 % 2][i % 4];
      pair = multiply_pair<bf16>(pair, rest_[i % 2]);
    }
  }

  // Whether one of the powers may be above kMostAtOnce.
  __device__ static bool is_large(uint32_t numbers) { return numbers & 0x80808080; }

 private:
  // As bf16 2^(126 + code - 127) has 126 + code as its exponent's field, up to 254.
  static constexpr uint32_t kMostAtOnce = 128, kExponent = twice(1 << 7);

  uint32_t factor_[2], rest_[2];
  bool large_;
};

template <class T, Code kCode>
using GroupOperands = std::conditional_t<kFoldsScales<T, kCode>, ScaledE2m1Operands, ScaledOperands<T, kCode>>;

}  // namespace radix::linear
