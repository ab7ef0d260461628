// Checks that families of dense products share.
#pragma once

#include <climits>

#include "common/check.h"
#include "common/tensor.h"
#include "radix_kernels/gemm.h"

namespace radix {

constexpr std::initializer_list<DType> kHalves = {DType::bf16, DType::f16};

// Begins at a multiple of 16 bytes, and so do all its rows; `row` is the dimension that steps between them.
inline void check_aligned(const Arg& t, int row) {
  const int64_t bytes = element_size(*t);
  if (reinterpret_cast<uintptr_t>(data_ptr<char>(*t)) % 16 != 0) t.reject(RK_INVALID, "is not aligned to 16 bytes");
  for (int i = 0; i < t->ndim; i++) {
    const bool steps = i == (row + t->ndim) % t->ndim || i + 2 < t->ndim;
    if (steps && t->shape[i] > 1 && t.stride(i) * bytes % 16 != 0)
      t.reject(RK_INVALID, "has a stride of %lld elements, expected a multiple of 16 bytes", (long long)t.stride(i));
  }
}

inline void check_multiple(const Arg& t, int dim, int64_t of, const char* what) {
  if (t.size(dim) % of != 0 || t.size(dim) == 0)
    t.reject(RK_INVALID, "has shape %s, expected %s to be a multiple of %lld", shape_text(*t).c_str(), what,
             (long long)of);
}

// Rows and columns are counted in 32 bits.
inline void check_sizes(const Arg& t) {
  for (int i = 0; i < t->ndim; i++)
    if (t.size(i) > INT_MAX / 2) t.reject(RK_UNSUPPORTED, "has shape %s: a size is too large", shape_text(*t).c_str());
}

inline void check_gate(const char* op, int32_t gate, const Arg& weight, int64_t n, bool bias) {
  if (gate < RK_GATE_NONE || gate > RK_GATE_INTERLEAVED)
    fail(RK_INVALID, "%s: gate is %d, expected 0, 1 or 2", op, gate);
  if (gate == RK_GATE_NONE) return;
  if (n % 16 != 0)
    weight.reject(RK_INVALID, "has %lld outputs, expected gate and up rows in multiples of 8", (long long)n);
  if (bias) fail(RK_INVALID, "%s: bias is given, a gated product has none", op);
}

// `like` has the dtype that a bias may have beside float32.
inline void check_bias(const char* op, const rk_tensor* tensor, const Arg& like, int64_t n) {
  if (!tensor) return;
  const Arg bias(op, "bias", tensor);
  bias.same_device(like).dtype({like.type(), DType::f32}).shape({n}, "outputs of the weight").last_contiguous();
}

// Of the type, one element or `count` of them along one dimension; steps over them are free.
inline void check_scales(const char* op, const char* name, const rk_tensor* tensor, const Arg& like, int64_t count,
                         DType type = DType::f32) {
  const Arg scales(op, name, tensor);
  scales.same_device(like).dtype({type});
  int others = 0;  // dimensions that are not of one element
  bool fits = true;
  for (int i = 0; i < scales->ndim; i++) {
    others += scales.size(i) != 1;
    fits = fits && (scales.size(i) == 1 || scales.size(i) == count);
  }
  if (!fits || others > 1)
    scales.reject(RK_INVALID, "has shape %s, expected [1] or [%lld]", shape_text(*scales).c_str(), (long long)count);
}

struct Operands {
  int64_t m, n, k;
};

// a [..., m, k] and b [..., k, n] column-major; `block` is what k and n are multiples of.
inline Operands check_operands(const Arg& a, const Arg& b, int ndim, int64_t block) {
  a.ndim(ndim).last_contiguous();
  b.same_device(a).same_dtype(a).ndim(ndim);
  check_multiple(a, -1, block, "k");
  check_multiple(b, -1, block, "n");
  if (b.size(-2) != a.size(-1))
    b.reject(RK_INVALID, "has shape %s, expected %lld rows (columns of %s)", shape_text(*b).c_str(),
             (long long)a.size(-1), a.name());
  if (b.stride(-2) != 1) b.reject(RK_INVALID, "is not column-major: stride(-2) is %lld", (long long)b.stride(-2));
  check_aligned(a, -2);
  check_aligned(b, -1);
  check_sizes(a);
  check_sizes(b);
  return {a.size(-2), b.size(-1), a.size(-1)};
}

// Operands of one FP8 format.
inline Operands check_fp8(const Arg& a, const Arg& b, int ndim, int64_t block) {
  a.backend_device().dtype({DType::f8e4m3, DType::f8e4m3fnuz});
  const Operands size = check_operands(a, b, ndim, block);
  if (a.type() == DType::f8e4m3fnuz) a.reject(RK_UNSUPPORTED, "is float8_e4m3fnuz, which the tensor cores do not know");
  return size;
}

// As far as a sum of products of codes stays within 32 bits; with a zero point a difference of codes reaches 255.
constexpr int64_t kMostInt8 = (INT_MAX / (128 * 128)) / 16 * 16, kMostInt8Shifted = (INT_MAX / (255 * 128)) / 16 * 16;

inline void check_zero_points(const char* op, const rk_int8_scaled_mm_args& a, const Arg& mat_a, const Operands& size) {
  if (!a.azp != !a.b_sums) fail(RK_INVALID, "%s: azp and b_sums are given together, or neither is", op);
  const int64_t most = a.azp ? kMostInt8Shifted : kMostInt8;
  if (size.k > most)
    mat_a.reject(RK_INVALID, "has %lld columns, at most %lld keep their sums in 32 bits", (long long)size.k,
                 (long long)most);
  if (!a.azp) return;
  if (a.gate != RK_GATE_NONE) fail(RK_INVALID, "%s: azp is given, a gated product has none", op);
  check_scales(op, "azp", a.azp, mat_a, size.m, DType::i32);
  const Arg sums(op, "b_sums", a.b_sums);
  sums.same_device(mat_a).dtype({DType::i32}).shape({size.n}, "columns of mat_b").last_contiguous();
}

// Gate, scales, bias and result of either kind of operands.
template <class Args>
void check_scaled(const char* op, const Args& a, const Arg& mat_a, const Arg& mat_b, const Operands& size) {
  check_gate(op, a.gate, mat_b, size.n, a.bias != nullptr);
  check_scales(op, "scales_a", a.scales_a, mat_a, size.m);
  check_scales(op, "scales_b", a.scales_b, mat_a, size.n);
  const Arg out(op, "out", a.out);
  out.same_device(mat_a).dtype(kHalves);
  out.shape({size.m, size.n / (a.gate == RK_GATE_NONE ? 1 : 2)}, "rows of mat_a, columns of mat_b");
  out.last_contiguous().writable();
  check_aligned(out, 0);
  check_bias(op, a.bias, out, size.n);
}

// All of a product with one scale a row of each operand, but for who computes it.
inline void check_fp8_scaled_mm(const char* op, const rk_fp8_scaled_mm_args& a) {
  const Arg mat_a(op, "mat_a", a.mat_a), mat_b(op, "mat_b", a.mat_b);
  check_scaled(op, a, mat_a, mat_b, check_fp8(mat_a, mat_b, 2, 16));
}

inline void check_int8_scaled_mm(const char* op, const rk_int8_scaled_mm_args& a) {
  const Arg mat_a(op, "mat_a", a.mat_a), mat_b(op, "mat_b", a.mat_b);
  mat_a.backend_device().dtype({DType::i8});
  const Operands size = check_operands(mat_a, mat_b, 2, 16);
  check_scaled(op, a, mat_a, mat_b, size);
  check_zero_points(op, a, mat_a, size);
}

inline bool is_empty(const rk_tensor& t) {
  return t.shape[0] == 0;
}

}  // namespace radix
