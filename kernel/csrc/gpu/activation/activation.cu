// Gated activations on the GPU. Bound by bytes: two reads and one write an element.
#include "api/activation.h"
#include "gpu/device/element.h"
#include "gpu/device/launch.h"
#include "gpu/device/rows.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 256;

// x / (1 + e^-x) to about 20 bits.
__device__ inline float fast_silu(float x) {
#if defined(__HIP__)
  return x * __builtin_amdgcn_rcpf(1.f + __builtin_amdgcn_exp2f(-0x1.715476p+0f * x));
#else
  return __fdividef(x, 1.f + __expf(-x));
#endif
}

// T is the type of the elements: 16-bit results do not need the last bits of float32's exponential.
struct Silu {
  template <class T>
  __device__ static float apply(float x) {
    if (sizeof(T) == 2) return fast_silu(x);
    return x / (1.f + exponential(-x));
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

template <class Act, int N, class T>
__device__ inline Pack<T, N> gate_pack(const Pack<T, N>& gate, const Pack<T, N>& up) {
  float x[N], y[N];
  widen_pack(gate, x);
  widen_pack(up, y);
#pragma unroll
  for (int i = 0; i < N; i++) y[i] *= Act::template apply<T>(x[i]);
  return round_pack<N, T>(y);
}

// Rows that step evenly, in units of 16 bytes: what nearly every call has. Little stands between a block's start and
// its loads, and a thread has one pack: the chip is full of blocks that wait for memory.
template <class Act, class T>
__global__ void __launch_bounds__(kThreads)
    gated_even_kernel(const Pack<T, kPackSize<T>>* input, Pack<T, kPackSize<T>>* out, uint32_t input_step,
                      uint32_t out_step, uint32_t packs, uint32_t total) {
  wait_for_previous();
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= total) return;
  const uint32_t row = i / packs, column = i - row * packs;
  const auto* x = input + (uint64_t{row} * input_step + column);
  const auto gate = x[0], up = x[packs];
  out[uint64_t{row} * out_step + column] = gate_pack<Act, kPackSize<T>, T>(gate, up);
}

// Any rows. A thread works on N elements of a row; `packs` of them make a row. Index is 32 bits wide where that is
// enough: the division by `packs` is then cheap beside the memory accesses.
template <class Act, int N, class Index, class T>
__global__ void __launch_bounds__(kThreads) gated_kernel(DeviceRows input, DeviceRows out, Index packs) {
  wait_for_previous();
  const Index total = static_cast<Index>(input.count) * packs;
  for (Index i = Index{blockIdx.x} * kThreads + threadIdx.x; i < total; i += Index{gridDim.x} * kThreads) {
    const Index row = quotient(i, packs);
    const int64_t column = int64_t{i - row * packs} * N;
    const T* x = input.at<T>(row) + column;
    const auto gate = load_pack<N>(x), up = load_pack<N>(x + int64_t{packs} * N);
    store_pack<N>(out.at<T>(row) + column, gate_pack<Act, N, T>(gate, up));
  }
}

template <class Act, class Index, class T>
void run(const char* op, const rk_gated_activation_args& args, rk_stream stream) {
  using Whole = Pack<T, kPackSize<T>>;
  const DeviceRows input = Rows(*args.input), out = Rows(*args.out);
  const int64_t n = args.out->shape[args.out->ndim - 1];
  const bool packed = n % kPackSize<T> == 0 && input.aligned(16) && out.aligned(16);
  const int64_t packs = packed ? n / kPackSize<T> : n, total = input.count * packs;
  const auto launch_over = [&](auto kernel, auto... arguments) {
    launch_dependent(op, args.input->device, stream, kernel, blocks_for(total, kThreads), kThreads, arguments...);
  };
  const auto step = [](const DeviceRows& rows) { return rows.dims > 0 ? rows.stride[0] / int64_t{sizeof(Whole)} : 0; };
  const auto even = [&](const DeviceRows& rows) { return rows.dims <= 1 && step(rows) >> 32 == 0; };
  if constexpr (sizeof(Index) == 4) {
    if (packed && even(input) && even(out) && total <= int64_t{kThreads} << 20)
      return launch_over(gated_even_kernel<Act, T>, reinterpret_cast<const Whole*>(input.data),
                         reinterpret_cast<Whole*>(out.data), static_cast<uint32_t>(step(input)),
                         static_cast<uint32_t>(step(out)), static_cast<uint32_t>(packs), static_cast<uint32_t>(total));
  }
  if (packed) {
    launch_over(gated_kernel<Act, kPackSize<T>, int64_t, T>, input, out, packs);
  } else {
    launch_over(gated_kernel<Act, 1, Index, T>, input, out, static_cast<Index>(packs));
  }
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
