// The scaled_mm family's entries: from checked tensors to one Problem.
#include "api/scaled_mm.h"
#include "common/tensor.h"
#include "sm80/scaled_mm/problem.h"

namespace radix {
namespace scaled_mm {

namespace {

// Scales, or zero points, of one element or of one dimension longer than that.
template <class T>
const T* values_of(const rk_tensor& t, int64_t* step) {
  *step = 0;
  for (int i = 0; i < t.ndim; i++)
    if (t.shape[i] > 1) *step = t.strides[i];
  return data_ptr<T>(t);
}

// What both kinds of operands have alike; mat_b is the transposed view of the weight.
template <class Args>
Problem describe(const char* op, const Args& args, rk_stream stream) {
  const rk_tensor &x = *args.mat_a, &weight = *args.mat_b, &out = *args.out;
  Problem q = {};
  q.op = op;
  q.device = x.device;
  q.stream = stream;
  q.x = data_ptr<char>(x);
  q.weight = data_ptr<char>(weight);
  q.x_step = x.strides[0];
  q.weight_step = weight.strides[1];
  q.m = static_cast<int>(x.shape[0]);
  q.n = static_cast<int>(weight.shape[1]);
  q.k = static_cast<int>(x.shape[1]);
  Epilogue& e = q.epilogue;
  e.out = data_ptr<char>(out);
  e.out_step = out.strides[0];
  e.out_is_f16 = dtype_of(out) == DType::f16;
  e.scale_x = values_of<float>(*args.scales_a, &e.scale_x_step);
  e.scale_w = values_of<float>(*args.scales_b, &e.scale_w_step);
  if (args.bias) {
    e.bias = data_ptr<char>(*args.bias);
    e.bias_is_float = dtype_of(*args.bias) == DType::f32;
  }
  return q;
}

}  // namespace
}  // namespace scaled_mm

namespace backend {

using namespace scaled_mm;

void int8_scaled_mm_sm80(const rk_int8_scaled_mm_args& args, rk_stream stream) {
  Problem q = describe("int8_scaled_mm", args, stream);
  if (args.azp) {
    q.epilogue.zeros = values_of<int32_t>(*args.azp, &q.epilogue.zeros_step);
    q.epilogue.weight_sums = data_ptr<int32_t>(*args.b_sums);
  }
  run_int8(q);
}

void fp8_scaled_mm_sm89(const rk_fp8_scaled_mm_args& args, rk_stream stream) {
  run_fp8(describe("fp8_scaled_mm", args, stream));
}

void fp8_scaled_mm_sm100(const rk_fp8_scaled_mm_args& args, rk_stream stream) {
  run_fp8_sm100(describe("fp8_scaled_mm", args, stream));
}

}  // namespace backend
}  // namespace radix
