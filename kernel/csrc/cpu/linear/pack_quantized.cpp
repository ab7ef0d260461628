// Packing, unpacking, gathering and quantizing weights of 8-bit and 4-bit codes; the results are the same at every ISA
// level.
#include "cpu/linear/quantized.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "common/tensor.h"
#include "cpu/float8.h"
#include "cpu/linear/floats4.h"
#include "cpu/linear/layout.h"
#include "cpu/linear/matrix.h"
#include "cpu/linear/quantize_w.h"
#include "cpu/simd_scalar.h"
#include "cpu/thread_pool.h"

namespace radix::cpu::RK_ISA {
namespace {

using linear_layout::kBlockN;
using linear_layout::Matrix;
using linear_layout::Quantized;

constexpr int64_t kGrainCodes = 1 << 15;

template <class Fn>
void for_blocks(const rk_packed_desc& desc, const Quantized& q, const Fn& fn) {
  parallel_for(linear_layout::num_blocks(desc.n), kGrainCodes / (kBlockN * q.kp) + 1,
               [&](int64_t begin, int64_t end) noexcept {
                 for (int64_t block = begin; block < end; block++) fn(block);
               });
}

bool has_float8(const Quantized& q) {
  return q.floats && q.bits == 8;
}

uint8_t get_code(const Quantized& q, const uint8_t* block, int64_t n, int64_t k) {
  const uint8_t byte = block[q.code(n, k)];
  return q.bits == 8 ? byte : Quantized::high(k) ? byte >> 4 : byte & 15;
}
// Codes of inputs [k, k + count) of output n; k is a multiple of 8, and `codes` has zeros up to the next one. kStep: as
// many as lie together in the block, 8 of 4 bits.
template <int64_t kStep>
void put_codes_by(const Quantized& q, uint8_t* block, int64_t n, int64_t k, int64_t count, const uint8_t* codes) {
  constexpr int64_t kBytes = kStep == 8 ? 4 : kStep, kEach = kBlockN * kBytes;
  uint8_t* to = block + q.code(n, k);
  for (int64_t i = 0; i < count; i += kStep, to += kEach) {
    if constexpr (kStep == 8) {
      uint32_t low, high;
      std::memcpy(&low, codes + i, sizeof low);
      std::memcpy(&high, codes + i + 4, sizeof high);
      low |= high << 4;
      std::memcpy(to, &low, sizeof low);
    } else {
      std::memcpy(to, codes + i, kBytes);
    }
  }
}
void put_codes(const Quantized& q, uint8_t* block, int64_t n, int64_t k, int64_t count, const uint8_t* codes) {
  if (q.bits == 4) return put_codes_by<8>(q, block, n, k, count, codes);
  has_float8(q) ? put_codes_by<2>(q, block, n, k, count, codes) : put_codes_by<4>(q, block, n, k, count, codes);
}

template <class Fn>
void dispatch_scale(const Quantized& q, uint8_t* scales, const Fn& fn) {
  dispatch_float(q.scale_type, [&](auto type) {
    using T = typename decltype(type)::type;
    fn(type, reinterpret_cast<T*>(scales));
  });
}

// The same, or powers of two as they are stored.
template <class Fn>
void dispatch_stored(const Quantized& q, uint8_t* scales, const Fn& fn) {
  if (q.scale_type == DType::u8) return fn(Type<uint8_t>{}, scales);
  dispatch_scale(q, scales, fn);
}

// scales: those of a block, or its minima.
float scale_of(const Quantized& q, const uint8_t* scales, int64_t n, int64_t g) {
  float scale = 0;
  if (q.scale_type == DType::u8) return std::ldexp(1.f, scales[g * kBlockN + n] - 128);  // half of the power
  dispatch_scale(q, const_cast<uint8_t*>(scales),
                 [&](auto, const auto* all) { scale = to_float(all[g * kBlockN + n]); });
  return scale;
}

int zero_of(const Quantized& q, const uint8_t* block, int64_t n, int64_t g) {
  if (q.has_zeros) return block[q.zeros + g * kBlockN + n];
  return q.bits == 8 || q.has_mins || q.floats ? 0 : kNibbleZero;
}

float value_of(const Quantized& q, uint8_t code) {
  if (has_float8(q)) return e4m3_values()[code];
  if (q.floats) return kTwiceFloats[code];
  return q.bits == 8 ? static_cast<int8_t>(code) : code;
}

// Quantizes group g of output n, whose inputs are `row`; false if one is not finite.
template <class T>
bool quantize_group(const Quantized& q, uint8_t* block, int64_t n, int64_t g, const WeightRow<T>& row) {
  Extremes seen;
  for_pieces(row, [&](int64_t, int64_t size, const float* values) { seen.see(values, size); });
  if (!seen.finite) return false;
  const float extreme = first_extreme(row, seen);
  float scale = q.bits == 8 ? std::fabs(extreme) / (q.floats ? kLargestE4m3 : 127) : extreme / -8;
  dispatch_scale(q, block + q.scales, [&](auto, auto* scales) {
    from_float(scale, scales[g * kBlockN + n]);
    scale = to_float(scales[g * kBlockN + n]);
  });
  const int low = q.bits == 8 ? -127 : -8, high = q.bits == 8 ? 127 : 7, zero = q.bits == 8 ? 0 : kNibbleZero;
  for_pieces(row, [&](int64_t begin, int64_t size, const float* values) {
    uint8_t codes[kPieceInputs];
    const int64_t whole = linear_layout::round_up(size, kLanes);
    if (scale == 0) {
      std::memset(codes, zero, whole);
    } else if (has_float8(q)) {
      round_to_float8(values, whole, scale, codes);
    } else {
      round_to_codes(values, whole, scale, low, high, zero, codes);
    }
    std::memset(codes + size, 0, whole - size);
    put_codes(q, block, n, g * q.group + begin, size, codes);
  });
  return true;
}

// All groups of a block's outputs [n0, n0 + count); returns the first output with a value that is not finite, or -1.
int64_t quantize_block(const rk_pack_weight_args& a, const Quantized& q, uint8_t* block, int64_t n0, int64_t count) {
  int64_t bad = -1;
  dispatch_float(dtype_of(*a.weight), [&](auto type) {
    using T = typename decltype(type)::type;
    const Matrix<T> w(*a.weight);
    for (int64_t n = 0; n < count && bad < 0; n++) {
      for (int64_t k0 = 0; k0 < q.k; k0 += q.group) {
        const WeightRow<T> row = {&w(n0 + n, k0), w.col, std::min(q.group, q.k - k0)};
        if (!quantize_group(q, block, n, k0 / q.group, row)) bad = n0 + n;
      }
    }
  });
  return bad;
}

void copy_codes(const rk_pack_weight_args& a, const Quantized& q, uint8_t* block, int64_t n0, int64_t count) {
  const Matrix<uint8_t> w(*a.weight);
  for (int64_t n = 0; n < count; n++) {
    for (int64_t k0 = 0; k0 < q.k; k0 += kPieceInputs) {
      const int64_t size = std::min(kPieceInputs, q.k - k0);
      uint8_t codes[kPieceInputs] = {};
      if (q.bits == 8 && w.col == 1) {
        std::memcpy(codes, &w(n0 + n, k0), size);
      } else if (q.bits == 8) {
        for (int64_t k = 0; k < size; k++) codes[k] = w(n0 + n, k0 + k);
      } else {
        for (int64_t k = 0; k < size; k++) {
          const uint8_t byte = w(n0 + n, (k0 + k) / 2);
          codes[k] = k % 2 ? byte >> 4 : byte & 15;
        }
      }
      put_codes(q, block, n, k0, size, codes);
    }
    for (int64_t g = 0; g < q.groups_k; g++) {
      const auto copy = [&](uint8_t* to, const rk_tensor& from) {
        dispatch_stored(q, to, [&](auto type, auto* scales) {
          scales[g * kBlockN + n] = Matrix<typename decltype(type)::type>(from)(n0 + n, g);
        });
      };
      copy(block + q.scales, *a.scales);
      if (q.has_mins) copy(block + q.mins, *a.mins);
      if (q.has_zeros) block[q.zeros + g * kBlockN + n] = Matrix<uint8_t>(*a.zeros)(n0 + n, g);
    }
  }
}

void check_zeros(const rk_pack_weight_args& a, const Quantized& q) {
  const Matrix<uint8_t> zeros(*a.zeros);
  for (int64_t n = 0; n < a.desc->n; n++)
    for (int64_t g = 0; g < q.groups_k; g++)
      if (zeros(n, g) > 16) fail(RK_INVALID, "pack_weight: zeros has the value %d, expected 0 to 16", zeros(n, g));
}

// Of powers of two with which every element is a float32.
void check_powers(const rk_pack_weight_args& a, const Quantized& q) {
  constexpr int kMost = 252;
  const Matrix<uint8_t> scales(*a.scales);
  for (int64_t n = 0; n < a.desc->n; n++)
    for (int64_t g = 0; g < q.groups_k; g++)
      if (scales(n, g) > kMost)
        fail(RK_INVALID, "pack_weight: scales has the code %d, expected 0 to %d", scales(n, g), kMost);
}

void check_float8(const rk_pack_weight_args& a, const Quantized& q) {
  const Matrix<uint8_t> w(*a.weight);
  std::atomic<bool> found{false};
  parallel_for(a.desc->n, kGrainCodes / q.k + 1, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t n = begin; n < end; n++)
      for (int64_t k = 0; k < q.k; k++)
        if (is_nan_e4m3(w(n, k))) found = true;
  });
  if (found) fail(RK_INVALID, "pack_weight: w has codes that are NaN (0x7f or 0xff)");
}

void lower_to(std::atomic<int64_t>& least, int64_t value) {
  int64_t seen = least;
  while (value < seen && !least.compare_exchange_weak(seen, value)) continue;
}

}  // namespace

void pack_quantized(const rk_pack_weight_args& a) {
  const Quantized q(*a.desc);
  if (a.zeros) check_zeros(a, q);
  if (q.scale_type == DType::u8) check_powers(a, q);
  if (has_float8(q) && a.scales) check_float8(a, q);
  uint8_t* packed = data_ptr<uint8_t>(*a.packed);
  std::atomic<int64_t> first_bad{a.desc->n};
  for_blocks(*a.desc, q, [&](int64_t b) {
    uint8_t* block = packed + b * q.block;
    std::memset(block, 0, q.block);
    const int64_t n0 = b * kBlockN, count = a.desc->n - n0 < kBlockN ? a.desc->n - n0 : kBlockN;
    if (a.scales) return copy_codes(a, q, block, n0, count);
    const int64_t bad = quantize_block(a, q, block, n0, count);
    if (bad >= 0) lower_to(first_bad, bad);
  });
  if (first_bad < a.desc->n)
    fail(RK_INVALID, "pack_weight: w has a value in row %lld that is not finite", (long long)first_bad.load());
}

void unpack_quantized(const rk_unpack_weight_args& a) {
  const Quantized q(*a.desc);
  const uint8_t* packed = data_ptr<uint8_t>(*a.packed);
  const Matrix<uint8_t> w(*a.weight);
  for_blocks(*a.desc, q, [&](int64_t b) {
    const uint8_t* block = packed + b * q.block;
    for (int64_t n = b * kBlockN; n < a.desc->n && n < (b + 1) * kBlockN; n++) {
      const int64_t lane = n % kBlockN;
      for (int64_t k = 0; k < q.k; k += q.bits == 8 ? 1 : 2) {
        const uint8_t code = get_code(q, block, lane, k);
        if (q.bits == 8) {
          w(n, k) = code;
        } else {
          w(n, k / 2) = static_cast<uint8_t>(code | (k + 1 < q.k ? get_code(q, block, lane, k + 1) << 4 : 0));
        }
      }
      for (int64_t g = 0; g < q.groups_k; g++) {
        const auto copy = [&](const uint8_t* from, const rk_tensor& to) {
          dispatch_stored(q, const_cast<uint8_t*>(from), [&](auto type, const auto* scales) {
            Matrix<typename decltype(type)::type>{to}(n, g) = scales[g * kBlockN + lane];
          });
        };
        copy(block + q.scales, *a.scales);
        if (q.has_mins) copy(block + q.mins, *a.mins);
        if (q.has_zeros) Matrix<uint8_t> (*a.zeros)(n, g) = block[q.zeros + g * kBlockN + lane];
      }
    }
  });
}

void gather_quantized(const rk_embedding_args& a) {
  const Quantized q(*a.desc);
  const uint8_t* packed = data_ptr<uint8_t>(*a.packed);
  const Indices ids(*a.ids);
  const Rows out(*a.out);
  dispatch_float(dtype_of(*a.out), [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(out.count, kGrainCodes / q.k + 1, [&](int64_t begin, int64_t end) noexcept {
      for (int64_t t = begin; t < end; t++) {
        const int64_t n = ids[t] % kBlockN;
        const uint8_t* block = packed + ids[t] / kBlockN * q.block;
        T* row = out.at<T>(t);
        for (int64_t g = 0; g < q.groups_k; g++) {
          const float scale = scale_of(q, block + q.scales, n, g);
          // Without minima -0, which adds nothing to a zero of either sign.
          const float least = q.has_mins ? scale_of(q, block + q.mins, n, g) : -0.f;
          const int zero = zero_of(q, block, n, g);
          // In double products are exact, so that it makes no difference whether they are added in one instruction.
          for (int64_t k = g * q.group; k < q.k && k < (g + 1) * q.group; k++) {
            const double code = double{value_of(q, get_code(q, block, n, k))} - zero;
            from_float(static_cast<float>(code * scale + least), row[k]);
          }
        }
      }
    });
  });
}

}  // namespace radix::cpu::RK_ISA
