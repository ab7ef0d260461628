// RMSNorm, with a residual added before it, whose result is quantized: kernels and their launch.
#pragma once

#include "gpu/quantize/quantized_rows.h"

namespace radix::quantize {

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
// share a group; 0: the row is one, as always in INT8.
template <int kBlock, class F, class T, class W>
__global__ void __launch_bounds__(kBlock, 1024 / kBlock) norm_kernel(NormTask task, Result result, int lanes) {
  constexpr int N = kPackSize<T>;
  if constexpr (__is_same(F, Int8)) lanes = 0;
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
      largest = fmaxf(largest, largest_of<F>(v[p]));
    }
    Scale<F> scale = {};
    if (lanes == 0) {
      scale = scale_of<F>(block_reduce<kBlock>(largest, Max()));
      if (threadIdx.x == 0) *result.scales.at(row, 0) = scale.value;
    }
#pragma unroll
    for (int p = 0; p < kRowPacks; p++) {
      if (lanes > 0) scale = scale_of<F>(largest_of_group<F>(v[p], lanes));
      if (column(p) >= result.width) continue;
      store_quantized<F>(result.out.at<uint8_t>(row) + column(p), v[p], scale);
      if (lanes > 0 && threadIdx.x % lanes == 0) *result.scales.at(row, column(p) / (lanes * N)) = scale.value;
    }
  }
}

// The same of rows too long for that: read once for the norm, once for its result, where that is one group twice.
template <class F, class T, class W>
__global__ void __launch_bounds__(kThreads) long_norm_kernel(NormTask task, Result result, int lanes) {
  constexpr int N = kPackSize<T>;
  if constexpr (__is_same(F, Int8)) lanes = 0;
  const W* weight = static_cast<const W*>(task.weight);
  const int64_t n = result.width;
  wait_for_previous();
  for (int64_t row = blockIdx.x; row < result.out.count; row += gridDim.x) {
    T* x = task.add ? task.residual.at<T>(row) : task.input.at<T>(row);
    float v[N], squares = 0;
    Scale<F> scale = {};
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
        largest = fmaxf(largest, largest_of<F>(v));
      }
      scale = scale_of<F>(block_reduce<kThreads>(largest, Max()));
      if (threadIdx.x == 0) *result.scales.at(row, 0) = scale.value;
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
      if (lanes > 0) scale = scale_of<F>(largest_of_group<F>(v, lanes));
      if (i >= n) continue;
      store_quantized<F>(result.out.at<uint8_t>(row) + i, v, scale);
      if (lanes > 0 && threadIdx.x % lanes == 0) *result.scales.at(row, quotient(i, lanes * N)) = scale.value;
    }
  }
}

// `group_size` 0: one scale a row.
template <class F, class T, class W>
void quantize_norms(const char* op, rk_device device, rk_stream stream, const NormTask& task, const Result& result,
                    int group_size) {
  constexpr int kPart = kPackSize<T> * kRowPacks;
  const unsigned rows = blocks_for(result.out.count, 1);
  const int lanes = group_size / kPackSize<T>;
  if (result.width <= kThreads * kPart) {
    launch_dependent(op, device, stream, norm_kernel<kThreads, F, T, W>, rows, kThreads, task, result, lanes);
  } else if (result.width <= kManyThreads * kPart) {
    launch_dependent(op, device, stream, norm_kernel<kManyThreads, F, T, W>, rows, kManyThreads, task, result, lanes);
  } else {
    launch_dependent(op, device, stream, long_norm_kernel<F, T, W>, rows, kThreads, task, result, lanes);
  }
}

// By the type of the weight, T or float32.
template <class F, class T>
void quantize_norms_of(const char* op, rk_device device, rk_stream stream, const NormTask& task, const Result& result,
                       int group_size, DType weight) {
  if (weight == DType::f32) {
    quantize_norms<F, T, float>(op, device, stream, task, result, group_size);
  } else {
    quantize_norms<F, T, T>(op, device, stream, task, result, group_size);
  }
}

// The arguments of FP8 and INT8 alike.
template <class Args>
NormTask norm_task(const Args& args) {
  const rk_tensor& second = args.residual ? *args.residual : *args.input;
  return {Rows(*args.input), Rows(second), data_ptr<char>(*args.weight), args.eps, args.residual != nullptr};
}

}  // namespace radix::quantize
