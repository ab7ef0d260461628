// The gemm family's entries: from checked tensors to one Problem, and the kernel by its number of tokens.
#include "api/gemm.h"

#include "gpu/device/fp8.h"
#include "gpu/device/launch.h"
#include "sm90/gemm/problem.cuh"

namespace radix {
namespace gemm {

namespace {

// x [..., m, k], its rows `x_step` apart; a weight [..., n, k] or its transposed view, rows along dimension `row`.
Problem describe(const char* op, rk_stream stream, const rk_tensor& x, const rk_tensor& weight, int row,
                 const rk_tensor& out) {
  Problem q = {};
  q.op = op;
  q.device = x.device;
  q.stream = stream;
  q.type = dtype_of(x);
  q.out_type = dtype_of(out);
  const int last = x.ndim - 1, bytes = q.element_size();
  q.x = data_ptr<char>(x);
  q.weight = data_ptr<char>(weight);
  q.m = static_cast<int>(x.shape[last - 1]);
  q.n = static_cast<int>(weight.shape[row]);
  q.k = static_cast<int>(x.shape[last]);
  q.x_step = x.strides[last - 1] * bytes;
  q.weight_step = weight.strides[row] * bytes;
  q.batch = 1;
  if (x.ndim == 3) {
    q.batch = static_cast<int>(x.shape[0]);
    q.x_batch = x.strides[0] * bytes;
    q.weight_batch = weight.strides[0] * bytes;
  }
  q.epilogue.out = data_ptr<char>(out);
  q.epilogue.out_step = out.strides[out.ndim - 2];
  q.epilogue.out_float = q.out_type == DType::f32;
  q.epilogue.out_aligned = reinterpret_cast<uintptr_t>(q.epilogue.out) % 16 == 0 && q.epilogue.out_step % 8 == 0;
  return q;
}

void set_bias(Epilogue& e, const rk_tensor* bias) {
  if (!bias) return;
  e.bias = data_ptr<char>(*bias);
  e.bias_float = dtype_of(*bias) == DType::f32;
}

// Scales, or zero points, of one element or of one dimension longer than that.
template <class T>
const T* scales_of(const rk_tensor& t, int64_t* step) {
  *step = 0;
  for (int i = 0; i < t.ndim; i++)
    if (t.shape[i] > 1) *step = t.strides[i];
  return data_ptr<T>(t);
}

// Up to 16 tokens of a small weight with enough rows: the mma_m16 kernel, whose blocks start sooner. From n and k, so
// that bits do not change with m.
constexpr int64_t kMmaM16Bytes = 16 << 20;
constexpr int kMmaM16Rows = 2048;

void run_int8(const Problem& q) {
  if (q.m <= kSwapAbTokens) return wgmma_swap_ab<int8_t>(q);
  q.out_type == DType::bf16 ? wgmma_persistent<int8_t, bf16>(q) : wgmma_persistent<int8_t, f16>(q);
}

void run(const Problem& q) {
  const bool fp8 = q.type == DType::f8e4m3, bf = q.type == DType::bf16;
  const bool small = int64_t{q.n} * q.k * q.element_size() <= kMmaM16Bytes && q.n >= kMmaM16Rows;
  if (!fp8 && small && q.m <= kMmaM16Tokens) return bf ? mma_m16<bf16>(q) : mma_m16<f16>(q);
  if (q.m <= kSwapAbTokens) return fp8 ? wgmma_swap_ab<e4m3>(q) : bf ? wgmma_swap_ab<bf16>(q) : wgmma_swap_ab<f16>(q);
  if (!fp8) return bf ? wgmma_persistent<bf16, bf16>(q) : wgmma_persistent<f16, f16>(q);
  q.out_type == DType::bf16 ? wgmma_persistent<e4m3, bf16>(q) : wgmma_persistent<e4m3, f16>(q);
}

}  // namespace
}  // namespace gemm

namespace backend {

using namespace gemm;

void linear_dense(const rk_linear_dense_args& args, rk_stream stream) {
  Problem q = describe("linear_dense", stream, *args.x, *args.weight, 0, *args.out);
  q.static_weight = args.static_weight != 0;
  q.epilogue.gate = static_cast<Gate>(args.gate);
  set_bias(q.epilogue, args.bias);
  if (args.residual) {
    q.epilogue.residual = data_ptr<char>(*args.residual);
    q.epilogue.residual_step = args.residual->strides[0];
  }
  run(q);
}

void fp8_scaled_mm(const rk_fp8_scaled_mm_args& args, rk_stream stream) {
  Problem q = describe("fp8_scaled_mm", stream, *args.mat_a, *args.mat_b, 1, *args.out);
  q.static_weight = args.static_weight != 0;
  q.fast = args.fast_accum != 0;
  q.epilogue.gate = static_cast<Gate>(args.gate);
  q.epilogue.scale_x = scales_of<float>(*args.scales_a, &q.epilogue.scale_x_step);
  q.epilogue.scale_w = scales_of<float>(*args.scales_b, &q.epilogue.scale_w_step);
  set_bias(q.epilogue, args.bias);
  run(q);
}

void int8_scaled_mm(const rk_int8_scaled_mm_args& args, rk_stream stream) {
  Problem q = describe("int8_scaled_mm", stream, *args.mat_a, *args.mat_b, 1, *args.out);
  q.static_weight = args.static_weight != 0;
  q.epilogue.gate = static_cast<Gate>(args.gate);
  q.epilogue.scale_x = scales_of<float>(*args.scales_a, &q.epilogue.scale_x_step);
  q.epilogue.scale_w = scales_of<float>(*args.scales_b, &q.epilogue.scale_w_step);
  set_bias(q.epilogue, args.bias);
  if (args.azp) {
    q.zeros.x = scales_of<int32_t>(*args.azp, &q.zeros.x_step);
    q.zeros.weight_sums = data_ptr<int32_t>(*args.b_sums);
  }
  run_int8(q);
}

void fp8_blockwise_scaled_mm(const rk_fp8_blockwise_scaled_mm_args& args, rk_stream stream) {
  Problem q = describe("fp8_blockwise_scaled_mm", stream, *args.mat_a, *args.mat_b, 1, *args.out);
  q.static_weight = args.static_weight != 0;
  q.block_x = data_ptr<float>(*args.scales_a);
  q.block_x_step = args.scales_a->strides[0];
  q.block_x_unit = args.scales_a->strides[1];
  q.block_w = data_ptr<float>(*args.scales_b);
  q.block_w_step = args.scales_b->strides[1];
  run(q);
}

void bmm_fp8(const rk_bmm_fp8_args& args, rk_stream stream) {
  Problem q = describe("bmm_fp8", stream, *args.a, *args.b, 2, *args.out);
  q.epilogue.scale_x = scales_of<float>(*args.a_scale, &q.epilogue.scale_x_step);
  q.epilogue.scale_w = scales_of<float>(*args.b_scale, &q.epilogue.scale_w_step);
  run(q);
}

}  // namespace backend
}  // namespace radix
