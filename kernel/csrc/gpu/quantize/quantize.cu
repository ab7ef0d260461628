// Quantization to FP8 on the GPU. Bound by bytes: one read and half a write an element. A block keeps its row in
// registers; longer rows are read a second time, from L1 or L2.
#include "api/quantize.h"
#include "gpu/device/fp8.h"
#include "gpu/device/launch.h"
#include "gpu/device/reduce.h"
#include "gpu/device/rows.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 256, kManyThreads = 1024;
constexpr int kRowPacks = 2;         // of a thread, where a row stays in registers
constexpr float kSmallest = 1e-10f;  // stands for the largest value of a group of zeros

template <class F>
__device__ inline float scale_of(float largest) {
  return fmaxf(largest, kSmallest) / F::kLargest;
}

template <int N>
__device__ inline float largest_of(const float (&v)[N]) {
  float largest = 0;
#pragma unroll
  for (int j = 0; j < N; j++) largest = fmaxf(largest, fabsf(v[j]));
  return largest;
}

// The largest of a group's values, which `lanes` neighbouring lanes hold. Every lane of the warp calls it.
template <int N>
__device__ inline float largest_of_group(const float (&v)[N], int lanes) {
  float largest = largest_of(v);
  for (int mask = lanes / 2; mask > 0; mask /= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
  return largest;
}

template <class F, int N>
__device__ inline void store_quantized(uint8_t* out, float (&v)[N], float scale) {
  divide(v, scale);
  store_pack<N>(out, to_fp8<F>(v));
}

// What is quantized: N values of a row from a column on.
template <class T>
struct Plain {
  DeviceRows input;
  static constexpr int N = kPackSize<T>;
  __device__ void load(int64_t row, int64_t column, float (&v)[N]) const {
    const auto pack = load_pack<N>(input.at<T>(row) + column);
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = to_float(pack.at[j]);
  }
};
template <class T>
struct Gated {
  DeviceRows input;
  int64_t width;  // columns of the result
  static constexpr int N = kPackSize<T>;
  __device__ void load(int64_t row, int64_t column, float (&v)[N]) const {
    const T* x = input.at<T>(row) + column;
    const auto gate = load_pack<N>(x), up = load_pack<N>(x + width);
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float g = to_float(gate.at[j]);
      v[j] = __fdividef(g, 1.f + exponential(-g)) * to_float(up.at[j]);
    }
  }
};

// Scales in a tensor of free strides, in elements.
struct ScaleRows {
  DeviceRows rows;
  int64_t step;
  __device__ float* at(int64_t row, int64_t group) const { return rows.at<float>(row) + group * step; }
};

struct Result {
  DeviceRows out;
  ScaleRows scales;
  int64_t width;
};

// A group belongs to kLanes neighbouring lanes, a pack each.
template <int kLanes, class F, class Source>
__global__ void __launch_bounds__(kThreads) group_kernel(Source source, Result result) {
  constexpr int N = Source::N;
  wait_for_previous();
  const int64_t groups = result.width / (kLanes * N), total = result.out.count * groups;
  const int lane = threadIdx.x % kLanes;
  // Whole blocks go round together: the shuffles need every lane.
  for (int64_t first = int64_t{blockIdx.x} * (kThreads / kLanes); first < total;
       first += int64_t{gridDim.x} * (kThreads / kLanes)) {
    const int64_t item = first + threadIdx.x / kLanes;
    const bool inside = item < total;
    const int64_t row = inside ? quotient(item, groups) : 0, group = inside ? remainder(item, groups) : 0;
    const int64_t column = (group * kLanes + lane) * N;
    float v[N] = {};
    if (inside) source.load(row, column, v);
    const float scale = scale_of<F>(largest_of_group(v, kLanes));
    if (!inside) continue;
    store_quantized<F>(result.out.at<uint8_t>(row) + column, v, scale);
    if (lane == 0) *result.scales.at(row, group) = scale;
  }
}

// A block a row, kPacks packs a thread; 0: any number, read twice.
template <int kBlock, int kPacks, class F, class Source>
__global__ void __launch_bounds__(kBlock) row_kernel(Source source, Result result) {
  constexpr int N = Source::N;
  wait_for_previous();
  for (int64_t row = blockIdx.x; row < result.out.count; row += gridDim.x) {
    uint8_t* out = result.out.at<uint8_t>(row);
    const int64_t first = int64_t{threadIdx.x} * N;
    float largest = 0, scale;
    if constexpr (kPacks > 0) {
      float v[kPacks][N];
#pragma unroll
      for (int p = 0; p < kPacks; p++)
        if (first + p * kBlock * N < result.width) {
          source.load(row, first + p * kBlock * N, v[p]);
          largest = fmaxf(largest, largest_of(v[p]));
        }
      scale = scale_of<F>(block_reduce<kBlock>(largest, Max()));
#pragma unroll
      for (int p = 0; p < kPacks; p++)
        if (first + p * kBlock * N < result.width) store_quantized<F>(out + first + p * kBlock * N, v[p], scale);
    } else {
      float v[N];
      for (int64_t i = first; i < result.width; i += kBlock * N) {
        source.load(row, i, v);
        largest = fmaxf(largest, largest_of(v));
      }
      scale = scale_of<F>(block_reduce<kBlock>(largest, Max()));
      for (int64_t i = first; i < result.width; i += kBlock * N) {
        source.load(row, i, v);
        store_quantized<F>(out + i, v, scale);
      }
    }
    if (threadIdx.x == 0) *result.scales.at(row, 0) = scale;
  }
}

// The scale so far: one of a float's bits order as the float does, for numbers of one sign.
template <class F, class Source>
__global__ void __launch_bounds__(kThreads) largest_kernel(Source source, Result result, unsigned* scale) {
  constexpr int N = Source::N;
  wait_for_previous();
  const int64_t packs = result.width / N, total = result.out.count * packs;
  float v[N], largest = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    source.load(quotient(i, packs), remainder(i, packs) * N, v);
    largest = fmaxf(largest, largest_of(v));
  }
  largest = block_reduce<kThreads>(largest, Max());
  if (threadIdx.x == 0) atomicMax(scale, __float_as_uint(scale_of<F>(largest)));
}
__global__ void zero_kernel(unsigned* scale) {
  wait_for_previous();
  *scale = 0;
}
template <class F, class Source>
__global__ void __launch_bounds__(kThreads) tensor_kernel(Source source, Result result, const float* scale) {
  constexpr int N = Source::N;
  wait_for_previous();
  const int64_t packs = result.width / N, total = result.out.count * packs;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = quotient(i, packs), column = remainder(i, packs) * N;
    float v[N];
    source.load(row, column, v);
    store_quantized<F>(result.out.at<uint8_t>(row) + column, v, *scale);
  }
}

struct NormTask {
  DeviceRows input, residual;
  const void* weight;
  float eps;
  bool add;
};

template <int N, class T>
__device__ inline void load_values(const T* from, float (&v)[N]) {
  const auto pack = load_pack<N>(from);
#pragma unroll
  for (int j = 0; j < N; j++) v[j] = to_float(pack.at[j]);
}

template <int N, class T>
__device__ inline void add_values(const T* from, float (&v)[N]) {
  const auto pack = load_pack<N>(from);
#pragma unroll
  for (int j = 0; j < N; j++) v[j] += to_float(pack.at[j]);
}

template <int N, class T>
__device__ inline void store_rounded(T* to, const float (&v)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int j = 0; j < N; j++) from_float(v[j], pack.at[j]);
  store_pack<N>(to, pack);
}

template <int N, class W>
__device__ inline void weigh(const W* weight, float factor, float (&v)[N]) {
  W w[N];
  load_wide<(kPackSize<W> < N ? kPackSize<W> : N)>(weight, w);
#pragma unroll
  for (int j = 0; j < N; j++) v[j] = v[j] * factor * to_float(w[j]);
}

// A block a row, in registers: 64 a thread, so that a multiprocessor has 1,024 of them. `lanes` neighbouring lanes
// share a group; 0: the row is one.
template <int kBlock, class F, class T, class W>
__global__ void __launch_bounds__(kBlock, 1024 / kBlock) norm_kernel(NormTask task, Result result, int lanes) {
  constexpr int N = kPackSize<T>;
  const W* weight = static_cast<const W*>(task.weight);
  wait_for_previous();
  for (int64_t row = blockIdx.x; row < result.out.count; row += gridDim.x) {
    float v[kRowPacks][N] = {}, squares = 0;
    W w[kRowPacks][N] = {};
    const auto column = [&](int p) { return (p * kBlock + static_cast<int>(threadIdx.x)) * N; };
#pragma unroll
    for (int p = 0; p < kRowPacks; p++) {
      if (column(p) >= result.width) continue;
      load_values(task.input.at<T>(row) + column(p), v[p]);
      load_wide<(kPackSize<W> < N ? kPackSize<W> : N)>(weight + column(p), w[p]);
      if (task.add) {
        T* residual = task.residual.at<T>(row) + column(p);
        add_values(residual, v[p]);
        store_rounded(residual, v[p]);
      }
#pragma unroll
      for (int j = 0; j < N; j++) squares += v[p][j] * v[p][j];
    }
    const float mean = block_reduce<kBlock>(squares, Sum()) / static_cast<float>(result.width);
    const float factor = 1.f / sqrtf(mean + task.eps);
    float largest = 0;
#pragma unroll
    for (int p = 0; p < kRowPacks; p++) {
#pragma unroll
      for (int j = 0; j < N; j++) v[p][j] = v[p][j] * factor * to_float(w[p][j]);
      largest = fmaxf(largest, largest_of(v[p]));
    }
    float scale = 0;
    if (lanes == 0) {
      scale = scale_of<F>(block_reduce<kBlock>(largest, Max()));
      if (threadIdx.x == 0) *result.scales.at(row, 0) = scale;
    }
#pragma unroll
    for (int p = 0; p < kRowPacks; p++) {
      if (lanes > 0) scale = scale_of<F>(largest_of_group(v[p], lanes));
      if (column(p) >= result.width) continue;
      store_quantized<F>(result.out.at<uint8_t>(row) + column(p), v[p], scale);
      if (lanes > 0 && threadIdx.x % lanes == 0) *result.scales.at(row, column(p) / (lanes * N)) = scale;
    }
  }
}

// The same of rows too long for that: read once for the norm, once for its result, where that is one group twice.
template <class F, class T, class W>
__global__ void __launch_bounds__(kThreads) long_norm_kernel(NormTask task, Result result, int lanes) {
  constexpr int N = kPackSize<T>;
  const W* weight = static_cast<const W*>(task.weight);
  const int64_t n = result.width;
  wait_for_previous();
  for (int64_t row = blockIdx.x; row < result.out.count; row += gridDim.x) {
    T* x = task.add ? task.residual.at<T>(row) : task.input.at<T>(row);
    float v[N], scale = 0, squares = 0;
    for (int64_t i = int64_t{threadIdx.x} * N; i < n; i += kThreads * N) {
      load_values(x + i, v);
      if (task.add) add_values(task.input.at<T>(row) + i, v);
#pragma unroll
      for (int j = 0; j < N; j++) squares += v[j] * v[j];
    }
    const float mean = block_reduce<kThreads>(squares, Sum()) / static_cast<float>(n);
    const float factor = 1.f / sqrtf(mean + task.eps);
    if (lanes == 0) {
      float largest = 0;
      for (int64_t i = int64_t{threadIdx.x} * N; i < n; i += kThreads * N) {
        load_values(x + i, v);
        if (task.add) add_values(task.input.at<T>(row) + i, v);
        weigh(weight + i, factor, v);
        largest = fmaxf(largest, largest_of(v));
      }
      scale = scale_of<F>(block_reduce<kThreads>(largest, Max()));
      if (threadIdx.x == 0) *result.scales.at(row, 0) = scale;
    }
    // Whole blocks go round together: the shuffles need every lane.
    for (int64_t first = 0; first < n; first += kThreads * N) {
      const int64_t i = first + threadIdx.x * N;
#pragma unroll
      for (int j = 0; j < N; j++) v[j] = 0;
      if (i < n) {
        load_values(x + i, v);
        if (task.add) {
          add_values(task.input.at<T>(row) + i, v);
          store_rounded(x + i, v);  // read for the last time, by this very thread
        }
        weigh(weight + i, factor, v);
      }
      if (lanes > 0) scale = scale_of<F>(largest_of_group(v, lanes));
      if (i >= n) continue;
      store_quantized<F>(result.out.at<uint8_t>(row) + i, v, scale);
      if (lanes > 0 && threadIdx.x % lanes == 0) *result.scales.at(row, quotient(i, lanes * N)) = scale;
    }
  }
}

using F = NativeE4m3;

// Calls fn(Type<T>) with the type of the values.
template <class Fn>
void dispatch(const char* op, const rk_tensor& input, const rk_tensor& out, const Fn& fn) {
  require_native_fp8(op, "out", out);
  dispatch_float(dtype_of(input), fn);
}

Result result_of(const rk_tensor& out, const rk_tensor& scales) {
  return {Rows(out), {Rows(scales), scales.strides[scales.ndim - 1]}, out.shape[out.ndim - 1]};
}

template <class Source>
void quantize_rows(const rk_per_token_quant_fp8_args& args, const Source& source, rk_stream stream) {
  const char* op = "per_token_quant_fp8";
  const rk_device device = args.input->device;
  const Result result = result_of(*args.out, *args.scales);
  if (args.group_size == 0) {
    constexpr int kPart = Source::N * kRowPacks;
    const unsigned rows = blocks_for(result.out.count, 1);
    if (result.width <= kThreads * kPart)
      return launch_dependent(op, device, stream, row_kernel<kThreads, kRowPacks, F, Source>, rows, kThreads, source,
                              result);
    const auto kernel = result.width <= kManyThreads * kPart ? row_kernel<kManyThreads, kRowPacks, F, Source>
                                                             : row_kernel<kManyThreads, 0, F, Source>;
    return launch_dependent(op, device, stream, kernel, rows, kManyThreads, source, result);
  }
  constexpr int kLanes = 128 / Source::N;
  const auto kernel = args.group_size == 128 ? group_kernel<kLanes, F, Source> : group_kernel<kLanes / 2, F, Source>;
  const int64_t groups = result.out.count * (result.width / args.group_size);
  launch_dependent(op, device, stream, kernel, blocks_for(groups, kThreads * Source::N / args.group_size), kThreads,
                   source, result);
}

}  // namespace

namespace backend {

void per_token_quant_fp8(const rk_per_token_quant_fp8_args& args, rk_stream stream) {
  dispatch("per_token_quant_fp8", *args.input, *args.out, [&](auto t) {
    using T = typename decltype(t)::type;
    const DeviceRows input = Rows(*args.input);
    if (args.gated) {
      quantize_rows(args, Gated<T>{input, args.out->shape[args.out->ndim - 1]}, stream);
    } else {
      quantize_rows(args, Plain<T>{input}, stream);
    }
  });
}

void per_tensor_quant_fp8(const rk_per_tensor_quant_fp8_args& args, rk_stream stream) {
  const char* op = "per_tensor_quant_fp8";
  const rk_device device = args.input->device;
  dispatch(op, *args.input, *args.out, [&](auto t) {
    using T = typename decltype(t)::type;
    const Plain<T> source{DeviceRows(Rows(*args.input))};
    const rk_tensor& out = *args.out;
    const Result result = {Rows(out), {Rows(out), 0}, out.shape[out.ndim - 1]};
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
  dispatch("rmsnorm_quant_fp8", *args.input, *args.out, [&](auto t) {
    using T = typename decltype(t)::type;
    const rk_tensor& second = args.residual ? *args.residual : *args.input;
    const NormTask task = {Rows(*args.input), Rows(second), data_ptr<char>(*args.weight), args.eps,
                           args.residual != nullptr};
    const Result result = result_of(*args.out, *args.scales);
    const auto run = [&](auto w) {
      using W = typename decltype(w)::type;
      const char* op = "rmsnorm_quant_fp8";
      constexpr int kPart = kPackSize<T> * kRowPacks;
      const rk_device device = args.input->device;
      const unsigned rows = blocks_for(result.out.count, 1);
      const int lanes = static_cast<int>(args.group_size) / kPackSize<T>;
      if (result.width <= kThreads * kPart) {
        launch_dependent(op, device, stream, norm_kernel<kThreads, F, T, W>, rows, kThreads, task, result, lanes);
      } else if (result.width <= kManyThreads * kPart) {
        launch_dependent(op, device, stream, norm_kernel<kManyThreads, F, T, W>, rows, kManyThreads, task, result,
                         lanes);
      } else {
        launch_dependent(op, device, stream, long_norm_kernel<F, T, W>, rows, kThreads, task, result, lanes);
      }
    };
    dtype_of(*args.weight) == DType::f32 ? run(Type<float>{}) : run(t);
  });
}

}  // namespace backend
}  // namespace radix
