// RMSNorm on the GPU, a block a row. Bound by bytes: the row comes from memory once; the second pass finds it in L1/L2.
#include "api/norm.h"
#include "gpu/element.h"
#include "gpu/launch.h"
#include "gpu/reduce.h"
#include "gpu/rows.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 256;

template <int N, class T>
__device__ float square_sum(const T* x, int64_t n) {
  float sum = 0;
  for (int64_t i = int64_t{threadIdx.x} * N; i < n; i += kThreads * N) {
    const auto pack = load_pack<N>(x + i);
#pragma unroll
    for (int j = 0; j < N; j++) sum += to_float(pack.at[j]) * to_float(pack.at[j]);
  }
  return block_reduce<kThreads>(sum, Sum());
}

// out may be x.
template <int N, class T, class W>
__device__ void scale_row(const T* x, const W* weight, T* out, int64_t n, float scale) {
  for (int64_t i = int64_t{threadIdx.x} * N; i < n; i += kThreads * N) {
    const auto pack = load_pack<N>(x + i);
    Pack<T, N> result;
#pragma unroll
    for (int j = 0; j < N; j++) from_float(to_float(pack.at[j]) * scale * to_float(weight[i + j]), result.at[j]);
    store_pack<N>(out + i, result);
  }
}

__device__ inline float scale_of(float sum, int64_t n, float eps) {
  return 1.f / sqrtf(sum / static_cast<float>(n) + eps);
}

template <int N, class T, class W>
__global__ void __launch_bounds__(kThreads)
    rmsnorm_kernel(DeviceRows input, DeviceRows out, const W* weight, int64_t n, float eps) {
  for (int64_t row = blockIdx.x; row < input.count; row += gridDim.x) {
    const T* x = input.at<T>(row);
    scale_row<N>(x, weight, out.at<T>(row), n, scale_of(square_sum<N>(x, n), n, eps));
  }
}

template <int N, class T, class W>
__global__ void __launch_bounds__(kThreads)
    fused_add_rmsnorm_kernel(DeviceRows input, DeviceRows residual, const W* weight, int64_t n, float eps) {
  for (int64_t row = blockIdx.x; row < input.count; row += gridDim.x) {
    T* x = input.at<T>(row);
    T* r = residual.at<T>(row);
    // Each thread reads back in square_sum just the elements that it writes here.
    for (int64_t i = int64_t{threadIdx.x} * N; i < n; i += kThreads * N) {
      const auto a = load_pack<N>(x + i), b = load_pack<N>(r + i);
      Pack<T, N> sum;
#pragma unroll
      for (int j = 0; j < N; j++) from_float(to_float(a.at[j]) + to_float(b.at[j]), sum.at[j]);
      store_pack<N>(r + i, sum);
    }
    scale_row<N>(r, weight, x, n, scale_of(square_sum<N>(r, n), n, eps));
  }
}

// Calls fn(Type<T>, Type<W>) with the types of the rows and of the weight.
template <class Fn>
void dispatch(const rk_tensor& input, const rk_tensor& weight, const Fn& fn) {
  dispatch_float(dtype_of(input), [&](auto t) {
    if (dtype_of(weight) == DType::f32) {
      fn(t, Type<float>{});
    } else {
      fn(t, t);
    }
  });
}

template <class T>
bool packable(const DeviceRows& a, const DeviceRows& b, int64_t n) {
  return n % kPackSize<T> == 0 && a.aligned(16) && b.aligned(16);
}

}  // namespace

namespace backend {

void rmsnorm(const rk_rmsnorm_args& args, rk_stream stream) {
  const rk_tensor& in = *args.input;
  const DeviceRows input = Rows(in), out = Rows(*args.out);
  const int64_t n = in.shape[in.ndim - 1];
  dispatch(in, *args.weight, [&](auto t, auto w) {
    using T = typename decltype(t)::type;
    using W = typename decltype(w)::type;
    const auto kernel = packable<T>(input, out, n) ? rmsnorm_kernel<kPackSize<T>, T, W> : rmsnorm_kernel<1, T, W>;
    launch("rmsnorm", in.device, stream, kernel, blocks_for(input.count, 1), kThreads, input, out,
           static_cast<const W*>(data_ptr<W>(*args.weight)), n, args.eps);
  });
}

void fused_add_rmsnorm(const rk_fused_add_rmsnorm_args& args, rk_stream stream) {
  const rk_tensor& in = *args.input;
  const DeviceRows input = Rows(in), residual = Rows(*args.residual);
  const int64_t n = in.shape[in.ndim - 1];
  dispatch(in, *args.weight, [&](auto t, auto w) {
    using T = typename decltype(t)::type;
    using W = typename decltype(w)::type;
    const auto kernel = packable<T>(input, residual, n) ? fused_add_rmsnorm_kernel<kPackSize<T>, T, W>
                                                        : fused_add_rmsnorm_kernel<1, T, W>;
    launch("fused_add_rmsnorm", in.device, stream, kernel, blocks_for(input.count, 1), kThreads, input, residual,
           static_cast<const W*>(data_ptr<W>(*args.weight)), n, args.eps);
  });
}

}  // namespace backend
}  // namespace radix
