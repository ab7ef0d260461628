// Packing, unpacking and gathering weights in super-blocks; the results are the same at every ISA level.
#include <cstring>

#include "common/tensor.h"
#include "cpu/linear/layout.h"
#include "cpu/linear/matrix.h"
#include "cpu/linear/supers.h"
#include "cpu/simd_scalar.h"
#include "cpu/thread_pool.h"

namespace radix::cpu::RK_ISA {
namespace {

using linear_layout::kBlockN;
using linear_layout::Matrix;
using linear_layout::SuperBlocks;

constexpr int64_t kGrainCodes = 1 << 15;
constexpr int kLowBits = 4;

// A code counted from 0. at: the input's place in the super-block.
int get_code(const SuperBlocks& q, const uint8_t* super, int64_t n, int64_t at) {
  const uint8_t byte = super[q.low_byte(n, at)];
  const int low = SuperBlocks::high(at) ? byte >> 4 : byte & 15;
  if (q.bits == kLowBits) return low;
  const int mask = (1 << (q.bits - kLowBits)) - 1;
  return low | (super[q.high_byte(n, at)] >> q.high_shift(at) & mask) << kLowBits;
}
// Into a super-block that was cleared before.
void put_code(const SuperBlocks& q, uint8_t* super, int64_t n, int64_t at, int code) {
  super[q.low_byte(n, at)] |= static_cast<uint8_t>(SuperBlocks::high(at) ? (code & 15) << 4 : code & 15);
  if (q.bits > kLowBits) super[q.high_byte(n, at)] |= static_cast<uint8_t>(code >> kLowBits << q.high_shift(at));
}

// The codes as packing takes them and unpacking gives them: two to a byte, or one of any sign.
struct Codes {
  const SuperBlocks& q;
  Matrix<uint8_t> w;
  Codes(const SuperBlocks& layout, const rk_tensor& weight) : q(layout), w(weight) {}

  int get(int64_t n, int64_t k) const {
    if (q.bits > kLowBits) return static_cast<int8_t>(w(n, k)) + q.zero();
    const uint8_t byte = w(n, k / 2);
    return k % 2 ? byte >> 4 : byte & 15;
  }
  // In ascending k.
  void put(int64_t n, int64_t k, int code) const {
    if (q.bits > kLowBits) {
      w(n, k) = static_cast<uint8_t>(code - q.zero());
    } else if (k % 2) {
      w(n, k / 2) |= static_cast<uint8_t>(code << 4);
    } else {
      w(n, k / 2) = static_cast<uint8_t>(code);
    }
  }
};

void check_codes(const rk_pack_weight_args& a, const SuperBlocks& q) {
  if (q.bits == kLowBits) return;
  const Matrix<int8_t> w(*a.weight);
  const int least = -q.zero(), most = least + (1 << q.bits) - 1;
  for (int64_t n = 0; n < a.desc->n; n++)
    for (int64_t k = 0; k < q.k; k++)
      if (w(n, k) < least || w(n, k) > most)
        fail(RK_INVALID, "pack_weight: w has the code %d in row %lld, expected %d to %d", w(n, k), (long long)n, least,
             most);
}

// Calls fn(packed block, output, its lane there) for all outputs, in parallel.
template <class Fn>
void for_outputs(const rk_packed_desc& desc, const SuperBlocks& q, const Fn& fn) {
  const int64_t blocks = linear_layout::num_blocks(desc.n);
  parallel_for(blocks, kGrainCodes / (kBlockN * q.kp) + 1, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t block = begin; block < end; block++)
      for (int64_t n = block * kBlockN; n < lesser(desc.n, (block + 1) * kBlockN); n++) fn(block, n, n % kBlockN);
  });
}

// The numbers of a super-block: its scales or its minima, from `offset` on.
template <class Fn>
void dispatch_number(const SuperBlocks& q, const uint8_t* super, int64_t offset, const Fn& fn) {
  dispatch_float(q.scale_type, [&](auto type) {
    using T = typename decltype(type)::type;
    fn(type, reinterpret_cast<T*>(const_cast<uint8_t*>(super) + offset));
  });
}
double number_of(const SuperBlocks& q, const uint8_t* super, int64_t offset, int64_t lane) {
  double value = 0;
  dispatch_number(q, super, offset, [&](auto, const auto* all) { value = to_float(all[lane]); });
  return value;
}
int sub_scale_of(const SuperBlocks& q, const uint8_t* super, int64_t lane, int64_t g) {
  return static_cast<int8_t>(super[q.sub_scale(lane, g)]);
}

}  // namespace

void pack_supers(const rk_pack_weight_args& a) {
  const SuperBlocks q(*a.desc);
  check_codes(a, q);
  uint8_t* packed = data_ptr<uint8_t>(*a.packed);
  std::memset(packed, 0, linear_layout::num_blocks(a.desc->n) * q.block);
  const Codes codes(q, *a.weight);
  const int64_t per_super = SuperBlocks::kInputs / q.group;
  for_outputs(*a.desc, q, [&](int64_t block, int64_t n, int64_t lane) {
    uint8_t* const first = packed + block * q.block;
    for (int64_t k = 0; k < q.k; k++)
      put_code(q, first + k / SuperBlocks::kInputs * q.super, lane, k % SuperBlocks::kInputs, codes.get(n, k));
    for (int64_t g = 0; g < q.groups_k; g++) {
      uint8_t* const super = first + g / per_super * q.super;
      super[q.sub_scale(lane, g % per_super)] = Matrix<uint8_t>(*a.sub_scales)(n, g);
      if (q.has_mins) super[q.sub_min(lane, g % per_super)] = Matrix<uint8_t>(*a.sub_mins)(n, g);
    }
    const auto copy = [&](int64_t offset, const rk_tensor& from) {
      for (int64_t s = 0; s < q.supers; s++)
        dispatch_number(q, first + s * q.super, offset,
                        [&](auto type, auto* all) { all[lane] = Matrix<typename decltype(type)::type>(from)(n, s); });
    };
    copy(q.scales, *a.scales);
    if (q.has_mins) copy(q.mins, *a.mins);
  });
}

void unpack_supers(const rk_unpack_weight_args& a) {
  const SuperBlocks q(*a.desc);
  const uint8_t* packed = data_ptr<uint8_t>(*a.packed);
  const Codes codes(q, *a.weight);
  const int64_t per_super = SuperBlocks::kInputs / q.group;
  for_outputs(*a.desc, q, [&](int64_t block, int64_t n, int64_t lane) {
    const uint8_t* const first = packed + block * q.block;
    for (int64_t k = 0; k < q.k; k++)
      codes.put(n, k, get_code(q, first + k / SuperBlocks::kInputs * q.super, lane, k % SuperBlocks::kInputs));
    for (int64_t g = 0; g < q.groups_k; g++) {
      const uint8_t* const super = first + g / per_super * q.super;
      Matrix<uint8_t> (*a.sub_scales)(n, g) = super[q.sub_scale(lane, g % per_super)];
      if (q.has_mins) Matrix<uint8_t> (*a.sub_mins)(n, g) = super[q.sub_min(lane, g % per_super)];
    }
    const auto copy = [&](int64_t offset, const rk_tensor& to) {
      for (int64_t s = 0; s < q.supers; s++)
        dispatch_number(q, first + s * q.super, offset, [&](auto type, const auto* all) {
          Matrix<typename decltype(type)::type>{to}(n, s) = all[lane];
        });
    };
    copy(q.scales, *a.scales);
    if (q.has_mins) copy(q.mins, *a.mins);
  });
}

void gather_supers(const rk_embedding_args& a) {
  const SuperBlocks q(*a.desc);
  const uint8_t* packed = data_ptr<uint8_t>(*a.packed);
  const Indices ids(*a.ids);
  const Rows out(*a.out);
  const int64_t per_super = SuperBlocks::kInputs / q.group;
  dispatch_float(dtype_of(*a.out), [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(out.count, kGrainCodes / q.k + 1, [&](int64_t begin, int64_t end) noexcept {
      for (int64_t t = begin; t < end; t++) {
        const int64_t lane = ids[t] % kBlockN;
        T* row = out.at<T>(t);
        for (int64_t g = 0; g < q.groups_k; g++) {
          const uint8_t* super = packed + ids[t] / kBlockN * q.block + g / per_super * q.super;
          // In double every product is exact.
          const double scale = number_of(q, super, q.scales, lane) * sub_scale_of(q, super, lane, g % per_super);
          double least = -0.0;  // which adds nothing to a zero of either sign
          if (q.has_mins) least = number_of(q, super, q.mins, lane) * super[q.sub_min(lane, g % per_super)];
          for (int64_t k = g * q.group; k < lesser(q.k, (g + 1) * q.group); k++) {
            const int code = get_code(q, super, lane, k % SuperBlocks::kInputs) - q.zero();
            from_float(static_cast<float>(code * scale + least), row[k]);
          }
        }
      }
    });
  });
}

}  // namespace radix::cpu::RK_ISA
