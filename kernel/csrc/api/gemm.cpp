// Gemm family: checks once for every backend, then the backend's kernel.
#include "api/gemm.h"

#include "api/gemm_checks.h"

using namespace radix;

namespace {

// Tokens whose results may lie anywhere; those of more leave by TMA.
constexpr int64_t kFewTokens = 64;
void check_whole_rows(const Arg& t) {
  check_multiple(t, 1, 8, "columns of more than 64 rows");
  check_aligned(t, 0);
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
    check_fp8_scaled_mm(op, a);
    if (!is_empty(*a.out)) backend::fp8_scaled_mm(a, stream);
  });
}

rk_status rk_int8_scaled_mm(const rk_int8_scaled_mm_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "int8_scaled_mm";
    const auto a = read_args(op, args);
    check_int8_scaled_mm(op, a);
    if (!is_empty(*a.out)) backend::int8_scaled_mm(a, stream);
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
