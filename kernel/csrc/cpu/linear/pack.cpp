// Packing, unpacking and gathering rows of dense weights: moves of whole elements, the same at every ISA level.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "api/linear.h"
#include "common/tensor.h"
#include "cpu/linear/kernels.h"
#include "cpu/linear/layout.h"
#include "cpu/thread_pool.h"

namespace radix {
namespace {

using namespace cpu;
using namespace cpu::linear_layout;

constexpr int64_t kGrainElements = 1 << 15;

// Calls fn(first output, last output) over ranges of packed blocks in parallel.
template <class Fn>
void for_blocks(const rk_packed_desc& desc, const Fn& fn) {
  const int64_t grain = kGrainElements / (kBlockN * padded_k(desc.k)) + 1;
  parallel_for(num_blocks(desc.n), grain, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t block = begin; block < end; block++) fn(block * kBlockN, std::min(desc.n, (block + 1) * kBlockN));
  });
}

// Calls fn(n, k, packed offset) for every weight element of outputs [n0, n1).
template <class Fn>
void for_elements(const rk_packed_desc& desc, int64_t n0, int64_t n1, const Fn& fn) {
  const int64_t kp = padded_k(desc.k);
  const bool pairs = desc.layout == RK_LAYOUT_PAIRS16;
  for (int64_t n = n0; n < n1; n++)
    for (int64_t k = 0; k < desc.k; k++) fn(n, k, pairs ? pairs16_offset(n, k, kp) : lanes16_offset(n, k, kp));
}

template <class T>
void pack(const rk_pack_weight_args& a) {
  const rk_packed_desc& desc = *a.desc;
  const T* weight = data_ptr<T>(*a.weight);
  T* packed = data_ptr<T>(*a.packed);
  const int64_t row = a.weight->strides[0], col = a.weight->strides[1];
  for_blocks(desc, [&](int64_t n0, int64_t n1) {
    std::memset(packed + n0 * padded_k(desc.k), 0, kBlockN * padded_k(desc.k) * sizeof(T));
    for_elements(desc, n0, n1, [&](int64_t n, int64_t k, int64_t at) { packed[at] = weight[n * row + k * col]; });
  });
}

template <class T>
void unpack(const rk_unpack_weight_args& a) {
  const T* packed = data_ptr<T>(*a.packed);
  T* weight = data_ptr<T>(*a.weight);
  const int64_t row = a.weight->strides[0], col = a.weight->strides[1];
  for_blocks(*a.desc, [&](int64_t n0, int64_t n1) {
    for_elements(*a.desc, n0, n1, [&](int64_t n, int64_t k, int64_t at) { weight[n * row + k * col] = packed[at]; });
  });
}

template <class T>
void gather(const rk_embedding_args& a) {
  const rk_packed_desc& desc = *a.desc;
  const T* packed = data_ptr<T>(*a.packed);
  const Indices ids(*a.ids);
  const Rows out(*a.out);
  parallel_for(out.count, kGrainElements / desc.k + 1, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t t = begin; t < end; t++) {
      const int64_t id = ids[t];
      T* row = out.at<T>(t);
      for_elements(desc, id, id + 1, [&](int64_t, int64_t k, int64_t at) { row[k] = packed[at]; });
    }
  });
}

// Packed weights are read front to back at every step: huge pages, where the system gives them, spare page walks. Those
// at the ends of a large one are meant too, for it may be a part of a merged weight.
void prefer_huge_pages(const rk_tensor& packed) {
  constexpr uintptr_t kHuge = 2 << 20;
  const auto data = reinterpret_cast<uintptr_t>(data_ptr<char>(packed));
  const uintptr_t size = packed.shape[0];
  if (size < kHuge / 2) return;
  const uintptr_t begin = data / kHuge * kHuge, end = (data + size + kHuge - 1) / kHuge * kHuge;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: it may fail
}

}  // namespace

namespace backend {

bool packs_whole_rows_of_nibbles() {
  return false;
}

int64_t packed_weight_info(rk_packed_desc& desc) {
  if (SuperBlocks::holds(desc)) {
    desc.layout = RK_LAYOUT_SUPERS16;
    return num_blocks(desc.n) * SuperBlocks(desc).block;
  }
  if (desc.kind != RK_WEIGHT_DENSE) {
    const Quantized q(desc);
    const bool float8 = q.bits == 8 && q.floats;
    desc.layout = float8 ? RK_LAYOUT_BYTES16 : q.bits == 8 ? RK_LAYOUT_QUADS16 : RK_LAYOUT_NIBBLES16;
    return num_blocks(desc.n) * q.block;
  }
  desc.layout = dtype_of(desc.dtype) == DType::bf16 ? RK_LAYOUT_PAIRS16 : RK_LAYOUT_LANES16;
  return elements(desc.n, desc.k) * (desc.dtype.bits / 8);
}

void pack_weight(const rk_pack_weight_args& args, rk_stream) {
  prefer_huge_pages(*args.packed);
  if (args.desc->kind != RK_WEIGHT_DENSE) return linear_kernels().pack_quantized(args);
  dispatch_float(dtype_of(args.desc->dtype), [&](auto type) { pack<typename decltype(type)::type>(args); });
}

void unpack_weight(const rk_unpack_weight_args& args, rk_stream) {
  if (args.desc->kind != RK_WEIGHT_DENSE) return linear_kernels().unpack_quantized(args);
  dispatch_float(dtype_of(args.desc->dtype), [&](auto type) { unpack<typename decltype(type)::type>(args); });
}

void linear(const rk_linear_args& args, rk_stream) {
  linear_kernels().products(&args, 1, nullptr);
}

void embedding(const rk_embedding_args& args, rk_stream) {
  if (!args.ids) fail(RK_UNSUPPORTED, "embedding: ids is NULL, which the CPU library does not take");
  const Indices ids(*args.ids);
  for (int64_t t = 0; t < ids.count(); t++)
    if (ids[t] < 0 || ids[t] >= args.desc->n)
      fail(RK_INVALID, "embedding: ids[%lld] is %lld, expected 0 to %lld (rows of the weight)", (long long)t,
           (long long)ids[t], (long long)args.desc->n - 1);
  if (args.desc->kind != RK_WEIGHT_DENSE) return linear_kernels().gather_quantized(args);
  dispatch_float(dtype_of(args.desc->dtype), [&](auto type) { gather<typename decltype(type)::type>(args); });
}

}  // namespace backend
}  // namespace radix
