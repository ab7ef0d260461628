// The linear family's entries on Hopper: which packed weights there are, and what runs a call on one.
#include "api/linear.h"

#include "sm90/linear/problem.cuh"

namespace radix {
namespace linear {
namespace {

void check_kind(const rk_packed_desc& desc) {
  const bool known = desc.kind == RK_WEIGHT_INT4 || desc.kind == RK_WEIGHT_INT8 || desc.kind == RK_WEIGHT_MXFP4;
  const bool group = desc.group == 0 || desc.group == 32 || desc.group == 64 || desc.group == 128;
  const bool wide = dtype_of(desc.dtype) == DType::f32;
  if (known && group && !desc.mins && !wide) return;
  fail(
      RK_UNSUPPORTED,
      "pack_weight: on a GPU weights are int4 (with or without zero points) and int8 in groups of 32, 64, 128 or whole "
      "rows, and mxfp4, all without minima and for bfloat16 or float16 inputs; this is kind %u, group %u%s%s",
      desc.kind, desc.group, desc.mins ? ", with minima" : "", wide ? ", for float32" : "");
}

void check_alignment(const rk_tensor& packed, const char* op) {
  if (reinterpret_cast<uintptr_t>(data_ptr<char>(packed)) % kPackedAlignment != 0)
    fail(RK_INVALID, "%s: the packed weight is not aligned to %d bytes", op, kPackedAlignment);
}

// Rows of x as TMA reads them, and few enough.
void check_x(const rk_tensor& x, const rk_tensor& out) {
  if (x.ndim != 2 || out.ndim != 2)
    fail(RK_UNSUPPORTED, "linear: x has %d dimensions, packed weights on a GPU take 2", x.ndim);
  if (x.shape[0] > kMostTokens)
    fail(RK_UNSUPPORTED, "linear: x has %lld rows, packed weights on a GPU take at most %d", (long long)x.shape[0],
         kMostTokens);
  const bool steps = x.shape[0] == 1 || x.strides[0] % 8 == 0;
  if (!steps || reinterpret_cast<uintptr_t>(data_ptr<char>(x)) % 16 != 0)
    fail(RK_INVALID, "linear: rows of x do not begin at multiples of 16 bytes");
}

// mixed_mma counts scales, zero points and tiles of k in 32 bits.
void check_size(const Layout& layout) {
  constexpr int64_t kMost = INT32_MAX;
  const int64_t numbers = layout.row_tiles * layout.numbers * kTileRows;
  if (numbers > kMost || layout.k_tiles > kMost)
    fail(RK_UNSUPPORTED, "linear: the weight has %lld scales, padding included; at most %lld are supported",
         (long long)numbers, (long long)kMost);
}

Problem describe(const rk_linear_args& args, rk_stream stream) {
  const rk_tensor &x = *args.x, &out = *args.out;
  Problem q{{}, Layout(*args.desc), dtype_of(args.desc->scale_dtype), data_ptr<char>(*args.packed)};
  gemm::Problem& g = q.gemm;
  g.op = "linear";
  g.device = x.device;
  g.stream = stream;
  g.type = dtype_of(x);
  g.out_type = dtype_of(out);
  g.x = data_ptr<char>(x);
  g.x_step = x.strides[0] * 2;
  g.m = static_cast<int>(x.shape[0]);
  g.n = static_cast<int>(args.desc->n);
  g.k = static_cast<int>(args.desc->k);
  g.batch = 1;
  g.static_weight = true;  // a packed weight is made once, and its maker waits for it
  gemm::Epilogue& e = g.epilogue;
  e.out = data_ptr<char>(out);
  e.out_step = out.strides[0];
  e.out_float = g.out_type == DType::f32;
  e.out_aligned = reinterpret_cast<uintptr_t>(e.out) % 16 == 0 && e.out_step % 8 == 0;
  e.gate = static_cast<gemm::Gate>(args.gate);
  if (args.bias) {
    e.bias = data_ptr<char>(*args.bias);
    e.bias_float = dtype_of(*args.bias) == DType::f32;
  }
  if (args.residual) {
    e.residual = data_ptr<char>(*args.residual);
    e.residual_step = args.residual->strides[0];
  }
  return q;
}

template <class T, Code kCode, int kGroup>
void run_group(const Problem& q) {
  takes_wgmma(planned(q), q.gemm.m) ? mixed_wgmma<T, kCode, kGroup>(q) : mixed_mma<T, kCode, kGroup>(q);
}

template <class T, Code kCode>
void run_code(const Problem& q) {
  if (q.layout.groups == 1 || q.layout.group == 128) return run_group<T, kCode, 128>(q);
  q.layout.group == 64 ? run_group<T, kCode, 64>(q) : run_group<T, kCode, 32>(q);
}

template <class T>
void run(const Problem& q) {
  switch (q.layout.code) {
    case Code::u4: return run_code<T, Code::u4>(q);
    case Code::e2m1: return run_group<T, Code::e2m1, 32>(q);
    case Code::s8: return run_code<T, Code::s8>(q);
  }
}

}  // namespace
}  // namespace linear

namespace backend {

using linear::Layout;

bool packs_whole_rows_of_nibbles() {
  return true;
}

int64_t packed_weight_info(rk_packed_desc& desc) {
  linear::check_kind(desc);
  desc.layout = RK_LAYOUT_FRAGMENTS64;
  return Layout(desc).bytes;
}

void pack_weight(const rk_pack_weight_args& args, rk_stream stream) {
  linear::check_alignment(*args.packed, "pack_weight");
  if (!args.scales) fail(RK_UNSUPPORTED, "pack_weight: scales are required, a GPU quantizes no floats here");
  linear::pack(Layout(*args.desc), args, stream);
}

void unpack_weight(const rk_unpack_weight_args& args, rk_stream stream) {
  linear::check_alignment(*args.packed, "unpack_weight");
  linear::unpack(Layout(*args.desc), args, stream);
}

void linear(const rk_linear_args& args, rk_stream stream) {
  linear::check_alignment(*args.packed, "linear");
  linear::check_x(*args.x, *args.out);
  const linear::Problem q = linear::describe(args, stream);
  linear::check_size(q.layout);
  q.gemm.type == DType::bf16 ? linear::run<bf16>(q) : linear::run<f16>(q);
}

void linear_argmax(const rk_linear_argmax_args&, rk_stream) {
  fail(RK_UNSUPPORTED, "linear_argmax: on a GPU outputs are written (linear), then compared");
}

void embedding(const rk_embedding_args& args, rk_stream stream) {
  linear::check_alignment(*args.packed, "embedding");
  linear::widen_rows(Layout(*args.desc), args, stream);
}

}  // namespace backend
}  // namespace radix
