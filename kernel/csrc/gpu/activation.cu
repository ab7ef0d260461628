// Gated activations on the GPU. Bound by bytes: two reads and one write an element.
#include "api/activation.h"
#include "gpu/element.h"
#include "gpu/launch.h"
#include "gpu/rows.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 256;

struct Silu {
  __device__ float operator()(float x) const { return x / (1.f + expf(-x)); }
};
struct Gelu {
  __device__ float operator()(float x) const { return 0.5f * x * (1.f + erff(x * 0.70710678118654752f)); }
};
struct GeluTanh {
  __device__ float operator()(float x) const {
    return 0.5f * x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  }
};

// A thread works on N elements of a row; `packs` of them make a row.
template <class Act, int N, class T>
__global__ void __launch_bounds__(kThreads) gated_kernel(DeviceRows input, DeviceRows out, int64_t packs) {
  const int64_t total = input.count * packs;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / packs, column = i % packs * N;
    const T* x = input.at<T>(row) + column;
    const auto gate = load_pack<N>(x), up = load_pack<N>(x + packs * N);
    Pack<T, N> result;
#pragma unroll
    for (int j = 0; j < N; j++) from_float(Act()(to_float(gate.at[j])) * to_float(up.at[j]), result.at[j]);
    store_pack<N>(out.at<T>(row) + column, result);
  }
}

template <class Act>
void gated(const char* op, const rk_gated_activation_args& args, rk_stream stream) {
  const rk_tensor& in = *args.input;
  const DeviceRows input = Rows(in), out = Rows(*args.out);
  const int64_t n = args.out->shape[args.out->ndim - 1];
  dispatch_float(dtype_of(in), [&](auto t) {
    using T = typename decltype(t)::type;
    const bool packed = n % kPackSize<T> == 0 && input.aligned(16) && out.aligned(16);
    const int64_t packs = packed ? n / kPackSize<T> : n;
    const auto kernel = packed ? gated_kernel<Act, kPackSize<T>, T> : gated_kernel<Act, 1, T>;
    launch(op, in.device, stream, kernel, blocks_for(input.count * packs, kThreads), kThreads, input, out, packs);
  });
}

}  // namespace

namespace backend {

void silu_and_mul(const rk_gated_activation_args& args, rk_stream stream) {
  gated<Silu>("silu_and_mul", args, stream);
}
void gelu_and_mul(const rk_gated_activation_args& args, rk_stream stream) {
  gated<Gelu>("gelu_and_mul", args, stream);
}
void gelu_tanh_and_mul(const rk_gated_activation_args& args, rk_stream stream) {
  gated<GeluTanh>("gelu_tanh_and_mul", args, stream);
}

}  // namespace backend
}  // namespace radix
