// Gemm family: checks once for every backend, then the backend's kernel.
#include "api/gemm.h"

#include <climits>

#include "common/check.h"
#include "common/tensor.h"

using namespace radix;

namespace {

constexpr std::initializer_list<DType> kHalves = {DType::bf16, DType::f16};

// Begins at a multiple of 16 bytes, and so do all its rows; `row` is the dimension that steps between them.
void check_aligned(const Arg& t, int row) {
  const int64_t bytes = element_size(*t);
  if (reinterpret_cast<uintptr_t>(data_ptr<char>(*t)) % 16 != 0) t.reject(RK_INVALID, "is not aligned to 16 bytes");
  for (int i = 0; i < t->ndim; i++) {
    const bool steps = i == (row + t->ndim) % t->ndim || i + 2 < t->ndim;
    if (steps && t->shape[i] > 1 && t.stride(i) * bytes % 16 != 0)
      t.reject(RK_INVALID, "has a stride of %lld elements, expected a multiple of 16 bytes", (long long)t.stride(i));
  }
}

void check_multiple(const Arg& t, int dim, int64_t of, const char* what) {
  if (t.size(dim) % of != 0 || t.size(dim) == 0)
    t.reject(RK_INVALID, "has shape %s, expected %s to be a multiple of %lld", shape_text(*t).c_str(), what,
             (long long)of);
}

// Tokens whose results may lie anywhere; those of more leave by TMA.
constexpr int64_t kFewTokens = 64;
void check_whole_rows(const Arg& t) {
  check_multiple(t, 1, 8, "columns of more than 64 rows");
  check_aligned(t, 0);
}

// Rows and columns are counted in 32 bits.
void check_sizes(const Arg& t) {
  for (int i = 0; i < t->ndim; i++)
    if (t.size(i) > INT_MAX / 2) t.reject(RK_UNSUPPORTED, "has shape %s: a size is too large", shape_text(*t).c_str());
}

void check_gate(const char* op, int32_t gate, const Arg& weight, int64_t n, bool bias) {
  if (gate < RK_GATE_NONE || gate > RK_GATE_INTERLEAVED)
    fail(RK_INVALID, "%s: gate is %d, expected 0, 1 or 2", op, gate);
  if (gate == RK_GATE_NONE) return;
  if (n % 16 != 0)
    weight.reject(RK_INVALID, "has %lld outputs, expected gate and up rows in multiples of 8", (long long)n);
  if (bias) fail(RK_INVALID, "%s: bias is given, a gated product has none", op);
}

// `like` has the dtype that a bias may have beside float32.
void check_bias(const char* op, const rk_tensor* tensor, const Arg& like, int64_t n) {
  if (!tensor) return;
  const Arg bias(op, "bias", tensor);
  bias.same_device(like).dtype({like.type(), DType::f32}).shape({n}, "outputs of the weight").last_contiguous();
}

// Of the type, one element or `count` of them along one dimension; steps over them are free.
void check_scales(const char* op, const char* name, const rk_tensor* tensor, const Arg& like, int64_t count,
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
Operands check_operands(const Arg& a, const Arg& b, int ndim, int64_t block) {
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
Operands check_fp8(const Arg& a, const Arg& b, int ndim, int64_t block) {
  a.backend_device().dtype({DType::f8e4m3, DType::f8e4m3fnuz});
  const Operands size = check_operands(a, b, ndim, block);
  if (a.type() == DType::f8e4m3fnuz) a.reject(RK_UNSUPPORTED, "is float8_e4m3fnuz, which the tensor cores do not know");
  return size;
}

// As far as a sum of products of codes stays within 32 bits; with a zero point a difference of codes reaches 255.
constexpr int64_t kMostInt8 = (INT_MAX / (128 * 128)) / 16 * 16, kMostInt8Shifted = (INT_MAX / (255 * 128)) / 16 * 16;

void check_zero_points(const char* op, const rk_int8_scaled_mm_args& a, const Arg& mat_a, const Operands& size) {
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

}  // namespace

rk_status rk_linear_dense(const rk_linear_dense_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "linear_dense";
    const auto a = read_args(op, args);
    const Arg x(op, "x", a.x), weight(op, "weight", a.weight), out(op, "out", a.out);
    x.backend_device().dtype(kHalves).ndim(2).last_contiguous();
    weight.same_device(x).same_dtype(x).ndim(2).last_contiguous();
    weight.shape({-1, x.size(1)}, "columns of x");
    check_multiple(x, 1, 8, "k");
    check_aligned(x, 0);
    check_aligned(weight, 0);
    check_sizes(weight);
    check_sizes(x);
    check_gate(op, a.gate, weight, weight.size(0), a.bias != nullptr);
    const int64_t columns = weight.size(0) / (a.gate == RK_GATE_NONE ? 1 : 2);
    out.same_device(x).dtype({x.type(), DType::f32}).shape({x.size(0), columns}, "rows of x, outputs of the weight");
    out.last_contiguous().writable();
    const bool many = x.size(0) > kFewTokens;
    if (many) check_whole_rows(out.same_dtype(x));
    check_bias(op, a.bias, x, weight.size(0));
    if (a.residual) {
      const Arg residual(op, "residual", a.residual);
      residual.same_device(x).same_dtype(x).same_shape(out).last_contiguous();
      if (many) check_whole_rows(residual);
    }
    if (out.numel() > 0) backend::linear_dense(a, stream);
  });
}

rk_status rk_fp8_scaled_mm(const rk_fp8_scaled_mm_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "fp8_scaled_mm";
    const auto a = read_args(op, args);
    const Arg mat_a(op, "mat_a", a.mat_a), mat_b(op, "mat_b", a.mat_b), out(op, "out", a.out);
    const Operands size = check_fp8(mat_a, mat_b, 2, 16);
    check_gate(op, a.gate, mat_b, size.n, a.bias != nullptr);
    check_scales(op, "scales_a", a.scales_a, mat_a, size.m);
    check_scales(op, "scales_b", a.scales_b, mat_a, size.n);
    out.same_device(mat_a).dtype(kHalves);
    out.shape({size.m, size.n / (a.gate == RK_GATE_NONE ? 1 : 2)}, "rows of mat_a, columns of mat_b");
    out.last_contiguous().writable();
    check_aligned(out, 0);
    check_bias(op, a.bias, out, size.n);
    if (out.numel() > 0) backend::fp8_scaled_mm(a, stream);
  });
}

rk_status rk_int8_scaled_mm(const rk_int8_scaled_mm_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "int8_scaled_mm";
    const auto a = read_args(op, args);
    const Arg mat_a(op, "mat_a", a.mat_a), mat_b(op, "mat_b", a.mat_b), out(op, "out", a.out);
    mat_a.backend_device().dtype({DType::i8});
    const Operands size = check_operands(mat_a, mat_b, 2, 16);
    check_gate(op, a.gate, mat_b, size.n, a.bias != nullptr);
    check_scales(op, "scales_a", a.scales_a, mat_a, size.m);
    check_scales(op, "scales_b", a.scales_b, mat_a, size.n);
    check_zero_points(op, a, mat_a, size);
    out.same_device(mat_a).dtype(kHalves);
    out.shape({size.m, size.n / (a.gate == RK_GATE_NONE ? 1 : 2)}, "rows of mat_a, columns of mat_b");
    out.last_contiguous().writable();
    check_aligned(out, 0);
    check_bias(op, a.bias, out, size.n);
    if (out.numel() > 0) backend::int8_scaled_mm(a, stream);
  });
}

rk_status rk_fp8_blockwise_scaled_mm(const rk_fp8_blockwise_scaled_mm_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "fp8_blockwise_scaled_mm";
    const auto a = read_args(op, args);
    const Arg mat_a(op, "mat_a", a.mat_a), mat_b(op, "mat_b", a.mat_b), out(op, "out", a.out);
    const Arg scales_a(op, "scales_a", a.scales_a), scales_b(op, "scales_b", a.scales_b);
    const Operands size = check_fp8(mat_a, mat_b, 2, 128);
    scales_a.same_device(mat_a).dtype({DType::f32}).shape({size.m, size.k / 128}, "rows, groups of 128 of mat_a");
    scales_b.same_device(mat_a).dtype({DType::f32});
    scales_b.shape({size.k / 128, size.n / 128}, "blocks of 128 x 128 of mat_b");
    if (scales_b.size(0) > 1 && scales_b.stride(0) != 1)
      scales_b.reject(RK_INVALID, "is not column-major: stride(0) is %lld", (long long)scales_b.stride(0));
    out.same_device(mat_a).dtype(kHalves).shape({size.m, size.n}, "rows of mat_a, columns of mat_b");
    out.last_contiguous().writable();
    check_aligned(out, 0);
    if (out.numel() > 0) backend::fp8_blockwise_scaled_mm(a, stream);
  });
}

rk_status rk_bmm_fp8(const rk_bmm_fp8_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "bmm_fp8";
    const auto a = read_args(op, args);
    const Arg x(op, "A", a.a), weight(op, "B", a.b), out(op, "out", a.out);
    const Operands size = check_fp8(x, weight, 3, 16);
    if (weight.size(0) != x.size(0))
      weight.reject(RK_INVALID, "has %lld matrices, A has %lld", (long long)weight.size(0), (long long)x.size(0));
    if (x.size(0) > 65535) x.reject(RK_UNSUPPORTED, "has %lld matrices, at most 65535", (long long)x.size(0));
    check_scales(op, "A_scale", a.a_scale, x, 1);
    check_scales(op, "B_scale", a.b_scale, x, 1);
    out.same_device(x).dtype(kHalves).shape({x.size(0), size.m, size.n}, "matrices, rows of A, columns of B");
    out.contiguous().writable();
    check_aligned(out, 1);
    if (out.numel() > 0) backend::bmm_fp8(a, stream);
  });
}
