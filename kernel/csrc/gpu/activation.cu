// Gated activations on the GPU. Bound by bytes: two reads and one write an element.
#include "api/activation.h"
#include "gpu/element.h"
#include "gpu/launch.h"
#include "gpu/rows.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 256;

// T is the type of the elements: 16-bit results do not need the last bits of float32's exponential.
struct Silu {
  template <class T>
  __device__ static float apply(float x) {
    if (sizeof(T) == 2) return __fdividef(x, 1.f + __expf(-x));
    return x / (1.f + expf(-x));
  }
};
struct Gelu {
  template <class T>
  __device__ static float apply(float x) {
    return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
  }
};
struct GeluTanh {
  template <class T>
  __device__ static float apply(float x) {
    return 0.5f * x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  }
};

// A thread works on N elements of a row; `packs` of them make a row. Index is 32 bits wide where that is enough: the
// division by `packs` is then cheap beside the memory accesses.
template <class Act, int N, class Index, class T>
__global__ void __launch_bounds__(kThreads) gated_kernel(DeviceRows input, DeviceRows out, Index packs) {
  wait_for_previous();
  const Index total = static_cast<Index>(input.count) * packs;
  for (Index i = Index{blockIdx.x} * kThreads + threadIdx.x; i < total; i += Index{gridDim.x} * kThreads) {
    const Index row = i / packs;
    const int64_t column = int64_t{i - row * packs} * N;
    const T* x = input.at<T>(row) + column;
    const auto gate = load_pack<N>(x), up = load_pack<N>(x + int64_t{packs} * N);
    Pack<T, N> result;
#pragma unroll
    for (int j = 0; j < N; j++)
      from_float(Act::template apply<T>(to_float(gate.at[j])) * to_float(up.at[j]), result.at[j]);
    store_pack<N>(out.at<T>(row) + column, result);
  }
}

template <class Act, class Index, class T>
void run(const char* op, const rk_gated_activation_args& args, rk_stream stream) {
  const DeviceRows input = Rows(*args.input), out = Rows(*args.out);
  const int64_t n = args.out->shape[args.out->ndim - 1];
  const bool packed = n % kPackSize<T> == 0 && input.aligned(16) && out.aligned(16);
  const int64_t packs = packed ? n / kPackSize<T> : n;
  const auto kernel = packed ? gated_kernel<Act, kPackSize<T>, Index, T> : gated_kernel<Act, 1, Index, T>;
  launch_dependent(op, args.input->device, stream, kernel, blocks_for(input.count * packs, kThreads), kThreads, input,
                   out, static_cast<Index>(packs));
}

template <class Act>
void gated(const char* op, const rk_gated_activation_args& args, rk_stream stream) {
  const rk_tensor& out = *args.out;
  int64_t elements = 1;
  for (int d = 0; d < out.ndim; d++) elements *= out.shape[d];
  dispatch_float(dtype_of(out), [&](auto t) {
    using T = typename decltype(t)::type;
    // The loop's index may pass the end by one step of at most 2^28.
    if (elements < int64_t{1} << 31) {
      run<Act, uint32_t, T>(op, args, stream);
    } else {
      run<Act, int64_t, T>(op, args, stream);
    }
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
