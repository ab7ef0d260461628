// Quantize family: checks once for every backend, then the backend's kernel.
#include "api/quantize.h"

#include "common/check.h"
#include "common/tensor.h"

using namespace radix;

namespace {

void check_rows(const Arg& t, int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(data_ptr<char>(*t)) % bytes != 0)
    t.reject(RK_INVALID, "is not aligned to %lld bytes", (long long)bytes);
  for (int i = 0; i + 1 < t->ndim; i++)
    if (t.size(i) > 1 && t.stride(i) * element_size(*t) % bytes != 0)
      t.reject(RK_INVALID, "has a stride of %lld elements, expected a multiple of %lld bytes", (long long)t.stride(i),
               (long long)bytes);
}

constexpr std::initializer_list<DType> kFp8 = {DType::f8e4m3, DType::f8e4m3fnuz}, kInt8 = {DType::i8};

// `width`: columns of the input for one of out, which is of one of the `codes`.
void check_values(const Arg& input, const Arg& out, int width, std::initializer_list<DType> codes) {
  input.backend_device().dtype(kFloats).min_ndim(1).last_contiguous();
  check_rows(input, 16);
  if (input.size(-1) % (16 * width) != 0)
    input.reject(RK_INVALID, "has shape %s, expected a last dimension in multiples of %d", shape_text(*input).c_str(),
                 16 * width);
  out.same_device(input).dtype(codes).ndim(input->ndim).last_contiguous().writable();
  bool same = out.size(-1) * width == input.size(-1);
  for (int i = 0; i + 1 < input->ndim; i++) same = same && out.size(i) == input.size(i);
  if (!same)
    out.reject(RK_INVALID, "has shape %s, expected %s%s", shape_text(*out).c_str(), shape_text(*input).c_str(),
               width == 2 ? " with half the last dimension" : "");
  check_rows(out, element_size(*input) == 2 ? 8 : 4);  // what a lane writes
}

void check_scales(const char* op, const Arg& scales, const Arg& out, int32_t group_size) {
  if (group_size != 0 && group_size != 64 && group_size != 128)
    fail(RK_INVALID, "%s: group_size is %d, expected 0, 64 or 128", op, group_size);
  if (group_size != 0 && out.size(-1) % group_size != 0)
    out.reject(RK_INVALID, "has shape %s, expected a last dimension in multiples of %d", shape_text(*out).c_str(),
               group_size);
  scales.same_device(out).dtype({DType::f32}).ndim(out->ndim).writable();
  bool same = scales.size(-1) == (group_size == 0 ? 1 : out.size(-1) / group_size);
  for (int i = 0; i + 1 < out->ndim; i++) same = same && scales.size(i) == out.size(i);
  if (!same)
    scales.reject(RK_INVALID, "has shape %s for values %s in groups of %d (0: rows)", shape_text(*scales).c_str(),
                  shape_text(*out).c_str(), group_size);
}

void check_norm(const char* op, const Arg& input, const rk_tensor* weights, const rk_tensor* added) {
  if (added) {
    const Arg residual(op, "residual", added);
    residual.same_device(input).same_dtype(input).same_shape(input).last_contiguous().writable();
    check_rows(residual, 16);
  }
  const Arg weight(op, "weight", weights);
  weight.same_device(input).shape({input.size(-1)}, "last dimension of input").last_contiguous();
  weight.dtype({input.type(), DType::f32});
  check_rows(weight, 16);
}

}  // namespace

rk_status rk_per_tensor_quant_fp8(const rk_per_tensor_quant_fp8_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "per_tensor_quant_fp8";
    const auto a = read_args(op, args);
    const Arg input(op, "input", a.input), out(op, "out", a.out), scale(op, "scale", a.scale);
    check_values(input, out, 1, kFp8);
    scale.same_device(input).dtype({DType::f32});
    if (scale.numel() != 1) scale.reject(RK_INVALID, "has shape %s, expected [1]", shape_text(*scale).c_str());
    if (!a.is_static || input.numel() > 0) backend::per_tensor_quant_fp8(a, stream);
  });
}

rk_status rk_per_token_quant_fp8(const rk_per_token_quant_fp8_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "per_token_quant_fp8";
    const auto a = read_args(op, args);
    const Arg input(op, "input", a.input), out(op, "out", a.out), scales(op, "scales", a.scales);
    check_values(input, out, a.gated ? 2 : 1, kFp8);
    check_scales(op, scales, out, a.group_size);
    if (out.numel() > 0) backend::per_token_quant_fp8(a, stream);
  });
}

rk_status rk_rmsnorm_quant_fp8(const rk_rmsnorm_quant_fp8_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "rmsnorm_quant_fp8";
    const auto a = read_args(op, args);
    const Arg input(op, "input", a.input), out(op, "out", a.out), scales(op, "scales", a.scales);
    check_values(input, out, 1, kFp8);
    check_norm(op, input, a.weight, a.residual);
    check_scales(op, scales, out, a.group_size);
    if (out.numel() > 0) backend::rmsnorm_quant_fp8(a, stream);
  });
}

rk_status rk_per_token_quant_int8(const rk_per_token_quant_int8_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "per_token_quant_int8";
    const auto a = read_args(op, args);
    const Arg input(op, "input", a.input), out(op, "out", a.out), scales(op, "scales", a.scales);
    check_values(input, out, a.gated ? 2 : 1, kInt8);
    check_scales(op, scales, out, 0);
    if (out.numel() > 0) backend::per_token_quant_int8(a, stream);
  });
}

rk_status rk_rmsnorm_quant_int8(const rk_rmsnorm_quant_int8_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "rmsnorm_quant_int8";
    const auto a = read_args(op, args);
    const Arg input(op, "input", a.input), out(op, "out", a.out), scales(op, "scales", a.scales);
    check_values(input, out, 1, kInt8);
    check_norm(op, input, a.weight, a.residual);
    check_scales(op, scales, out, 0);
    if (out.numel() > 0) backend::rmsnorm_quant_int8(a, stream);
  });
}
