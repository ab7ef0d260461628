// Quantization to FP8 on the GPU. Bound by bytes: one read and half a write an element. A block keeps its row in
// registers (quantized_rows.h).
#include "api/quantize.h"
#include "gpu/quantize/quantized_norms.h"

namespace radix {
namespace quantize {
namespace {

// A group belongs to kLanes neighbouring lanes, a pack each.
template <int kLanes, class F, class Source>
__global__ void __launch_bounds__(kThreads) group_kernel(Source source, Result<> result) {
  constexpr int N = Source::N;
  wait_for_previous();
  const int64_t groups = result.width / (kLanes * N), total = result.out.count * groups;
  const int lane = threadIdx.x % kLanes;
  // Whole blocks go round together: the shuffles need every lane.
  for (int64_t first = int64_t{blockIdx.x} * (kThreads / kLanes); first < total;
       first += int64_t{gridDim.x} * (kThreads / kLanes)) {
    const int64_t item = first + threadIdx.x / kLanes;
    const bool inside = item < total;
    const int64_t row = inside ? quotient(item, groups) : 0, group = inside ? item - row * groups : 0;
    const int64_t column = (group * kLanes + lane) * N;
    float v[N] = {};
    if (inside) read_values(source, row, column, v);
    const Scale<F> scale = scale_of<F>(largest_of_group<F>(v, kLanes));
    if (!inside) continue;
    store_quantized<F>(result.out.at<uint8_t>(row) + column, v, scale);
    if (lane == 0) *result.scales.at(row, group) = scale.value();
  }
}

// The scale so far: one of a float's bits order as the float does, for numbers of one sign.
template <class F, class Source>
__global__ void __launch_bounds__(kThreads) largest_kernel(Source source, Result<> result, unsigned* scale) {
  constexpr int N = Source::N;
  wait_for_previous();
  const int64_t packs = result.width / N, total = result.out.count * packs;
  float v[N], largest = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    read_values(source, quotient(i, packs), remainder(i, packs) * N, v);
    largest = largest_of<F>(v, largest);
  }
  largest = block_reduce<kThreads>(largest, Max());
  if (threadIdx.x == 0) atomicMax(scale, __float_as_uint(scale_of<F>(largest).value()));
}
__global__ void zero_kernel(unsigned* scale) {
  wait_for_previous();
  *scale = 0;
}
template <class F, class Source>
__global__ void __launch_bounds__(kThreads) tensor_kernel(Source source, Result<> result, const float* scale) {
  constexpr int N = Source::N;
  wait_for_previous();
  const int64_t packs = result.width / N, total = result.out.count * packs;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = quotient(i, packs), column = remainder(i, packs) * N;
    float v[N];
    read_values(source, row, column, v);
    store_quantized<F>(result.out.at<uint8_t>(row) + column, v, Scale<F>{*scale});
  }
}

using F = NativeE4m3;

// Calls fn(Type<T>) with the type of the values.
template <class Fn>
void dispatch(const char* op, const rk_tensor& input, const rk_tensor& out, const Fn& fn) {
  require_native_fp8(op, "out", out);
  dispatch_float(dtype_of(input), fn);
}

template <class Source>
void quantize_groups(const rk_per_token_quant_fp8_args& args, const Source& source, const Result<>& result,
                     rk_stream stream) {
  constexpr int kLanes = 128 / Source::N;
  const auto kernel = args.group_size == 128 ? group_kernel<kLanes, F, Source> : group_kernel<kLanes / 2, F, Source>;
  const int64_t groups = result.out.count * (result.width / args.group_size);
  launch_dependent("per_token_quant_fp8", args.input->device, stream, kernel,
                   blocks_for(groups, kThreads * Source::N / args.group_size), kThreads, source, result);
}

}  // namespace
}  // namespace quantize

namespace backend {

using namespace quantize;

void per_token_quant_fp8(const rk_per_token_quant_fp8_args& args, rk_stream stream) {
  const char* op = "per_token_quant_fp8";
  dispatch(op, *args.input, *args.out, [&](auto t) {
    using T = typename decltype(t)::type;
    const Result<> result = result_of(*args.out, *args.scales);
    with_source<T>(*args.input, *args.out, args.gated != 0, [&](const auto& source) {
      if (args.group_size == 0) {
        quantize_rows<F>(op, args.input->device, stream, source, result);
      } else {
        quantize_groups(args, source, result, stream);
      }
    });
  });
}

void per_tensor_quant_fp8(const rk_per_tensor_quant_fp8_args& args, rk_stream stream) {
  const char* op = "per_tensor_quant_fp8";
  const rk_device device = args.input->device;
  dispatch(op, *args.input, *args.out, [&](auto t) {
    using T = typename decltype(t)::type;
    const Plain<T> source{DeviceRows(Rows(*args.input))};
    const rk_tensor& out = *args.out;
    const Result<> result = {Rows(out), {Rows(out), 0}, out.shape[out.ndim - 1]};
    const unsigned blocks = blocks_for(result.out.count * (result.width / Plain<T>::N), kThreads, 132 * 16);
    if (!args.is_static) {
      unsigned* bits = data_ptr<unsigned>(*args.scale);
      launch_dependent(op, device, stream, zero_kernel, 1, 1, bits);
      launch_dependent(op, device, stream, largest_kernel<F, Plain<T>>, blocks > 0 ? blocks : 1, kThreads, source,
                       result, bits);
    }
    if (blocks > 0)
      launch_dependent(op, device, stream, tensor_kernel<F, Plain<T>>, blocks, kThreads, source, result,
                       static_cast<const float*>(data_ptr<float>(*args.scale)));
  });
}

void rmsnorm_quant_fp8(const rk_rmsnorm_quant_fp8_args& args, rk_stream stream) {
  const char* op = "rmsnorm_quant_fp8";
  dispatch(op, *args.input, *args.out, [&](auto t) {
    using T = typename decltype(t)::type;
    quantize_norms_of<F, T>(op, args.input->device, stream, norm_task(args), result_of(*args.out, *args.scales),
                            static_cast<int>(args.group_size), dtype_of(*args.weight));
  });
}

}  // namespace backend
}  // namespace radix
