// RMSNorm, with a residual added before it, whose result is quantized: kernels and their launch.
#pragma once

#include "gpu/quantize/quantized_rows.h"

namespace radix::quantize {

template <class R = DeviceRows>
struct NormTask {
  R input, residual;
  const void* weight;
  float eps;
  bool add;

  bool is_even() const { return input.even() && residual.even(); }
  NormTask<EvenRows> even() const { return {EvenRows(input), EvenRows(residual), weight, eps, add}; }
};

template <class T, int N>
__device__ inline void add_waiting(const Waiting<T>& pack, float (&v)[N]) {
  float other[N];
  widen_waiting<T>(pack, other);
#pragma unroll
  for (int j = 0; j < N; j++) v[j] += other[j];
}

template <int N, class W>
__device__ inline void weigh(const W* weight, float factor, float (&v)[N]) {
  W w[N];
  load_wide<(kPackSize<W> < N ? kPackSize<W> : N)>(weight, w);
#pragma unroll
  for (int j = 0; j < N; j++) v[j] = v[j] * factor * to_float(w[j]);
}

constexpr int kRowPacks = 2;  // of a thread, where a row stays in registers

template <class T>
struct NormPacks {
  Waiting<T> input[kRowPacks] = {}, residual[kRowPacks] = {};
};

// The blocks of norm_kernel that a multiprocessor has registers for: 64 a thread.
template <int kBlock>
constexpr int kNormBlocks = 1024 / kBlock;

// A block a row, in registers. A block works on several rows one after another: the weight it reads once, and a row
// while the one before is reduced. `lanes` neighbouring lanes share a group; 0: the row is one, as always in INT8.
template <int kBlock, class F, class T, class W>
__global__ void __launch_bounds__(kBlock, kNormBlocks<kBlock>)
    norm_kernel(NormTask<EvenRows> task, Result<EvenRows> result, int lanes) {
  constexpr int N = kPackSize<T>;
  if constexpr (__is_same(F, Int8)) lanes = 0;
  const int width = static_cast<int>(result.width);
  const auto column = [&](int p) { return (p * kBlock + static_cast<int>(threadIdx.x)) * N; };
  constexpr int kParts = N / kPackSize<W>;
  Waiting<W> weight[kRowPacks][kParts] = {};  // read before the wait: no kernel in flight writes it
#pragma unroll
  for (int p = 0; p < kRowPacks; p++) {
    const W* from = static_cast<const W*>(task.weight) + column(p);
#pragma unroll
    for (int i = 0; i < kParts; i++)
      if (column(p) < width) weight[p][i] = load_waiting(from + i * kPackSize<W>);
  }
  NormPacks<T> packs;  // zeros outside the row
  const auto fetch = [&](int64_t row) {
#pragma unroll
    for (int p = 0; p < kRowPacks; p++) {
      if (column(p) >= width) continue;
      packs.input[p] = load_waiting(task.input.template at<T>(row) + column(p));
      if (task.add) packs.residual[p] = load_waiting(task.residual.template at<T>(row) + column(p));
    }
  };
  wait_for_previous();
  if (blockIdx.x < result.out.count) fetch(blockIdx.x);
  for (int64_t row = blockIdx.x; row < result.out.count; row += gridDim.x) {
    float v[kRowPacks][N], squares = 0;
#pragma unroll
    for (int p = 0; p < kRowPacks; p++) {
      widen_waiting<T>(packs.input[p], v[p]);
      if (task.add) {
        add_waiting<T>(packs.residual[p], v[p]);
        if (column(p) < width) store_pack<N>(task.residual.template at<T>(row) + column(p), round_pack<N, T>(v[p]));
      }
#pragma unroll
      for (int j = 0; j < N; j++) squares += v[p][j] * v[p][j];
    }
    if (row + gridDim.x < result.out.count) fetch(row + gridDim.x);
    const float mean = block_reduce<kBlock>(squares, Sum()) / static_cast<float>(width);
    const float factor = 1.f / sqrtf(mean + task.eps);
    float largest = 0;
#pragma unroll
    for (int p = 0; p < kRowPacks; p++) {
#pragma unroll
      for (int i = 0; i < kParts; i++) {
        float w[kPackSize<W>];
        widen_waiting<W>(weight[p][i], w);
#pragma unroll
        for (int j = 0; j < kPackSize<W>; j++) {
          float& value = v[p][i * kPackSize<W> + j];
          value = value * factor * w[j];
        }
      }
      largest = largest_of<F>(v[p], largest);
    }
    Scale<F> scale = {};
    if (lanes == 0) {
      scale = scale_of<F>(largest_of_block(largest));
      if (threadIdx.x == 0) *result.scales.at(row, 0) = scale.value();
    }
    uint8_t* out = result.out.template at<uint8_t>(row);
#pragma unroll
    for (int p = 0; p < kRowPacks; p++) {
      if (lanes > 0) scale = scale_of<F>(largest_of_group<F>(v[p], lanes));
      if (column(p) >= width) continue;
      store_quantized<F>(out + column(p), v[p], scale);
      if (lanes > 0 && threadIdx.x % lanes == 0) *result.scales.at(row, column(p) / (lanes * N)) = scale.value();
    }
  }
}

// The same of rows too long for that, or of uneven steps: read once for the norm, once for its result, where that is
// one group twice.
template <class F, class T, class W>
__global__ void __launch_bounds__(kThreads) long_norm_kernel(NormTask<> task, Result<> result, int lanes) {
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
      widen_waiting<T>(load_waiting(x + i), v);
      if (task.add) add_waiting<T>(load_waiting(task.input.template at<T>(row) + i), v);
#pragma unroll
      for (int j = 0; j < N; j++) squares += v[j] * v[j];
    }
    const float mean = block_reduce<kThreads>(squares, Sum()) / static_cast<float>(n);
    const float factor = 1.f / sqrtf(mean + task.eps);
    if (lanes == 0) {
      float largest = 0;
      for (int64_t i = int64_t{threadIdx.x} * N; i < n; i += kThreads * N) {
        widen_waiting<T>(load_waiting(x + i), v);
        if (task.add) add_waiting<T>(load_waiting(task.input.template at<T>(row) + i), v);
        weigh(weight + i, factor, v);
        largest = largest_of<F>(v, largest);
      }
      scale = scale_of<F>(largest_of_block(largest));
      if (threadIdx.x == 0) *result.scales.at(row, 0) = scale.value();
    }
    // Whole blocks go round together: the shuffles need every lane.
    for (int64_t first = 0; first < n; first += kThreads * N) {
      const int64_t i = first + threadIdx.x * N;
#pragma unroll
      for (int j = 0; j < N; j++) v[j] = 0;
      if (i < n) {
        widen_waiting<T>(load_waiting(x + i), v);
        if (task.add) {
          add_waiting<T>(load_waiting(task.input.template at<T>(row) + i), v);
          store_pack<N>(x + i, round_pack<N, T>(v));  // read for the last time, by this very thread
        }
        weigh(weight + i, factor, v);
      }
      if (lanes > 0) scale = scale_of<F>(largest_of_group<F>(v, lanes));
      if (i >= n) continue;
      store_quantized<F>(result.out.at<uint8_t>(row) + i, v, scale);
      if (lanes > 0 && threadIdx.x % lanes == 0) *result.scales.at(row, quotient(i, lanes * N)) = scale.value();
    }
  }
}

// `group_size` 0: one scale a row.
template <class F, class T, class W>
void quantize_norms(const char* op, rk_device device, rk_stream stream, const NormTask<>& task, const Result<>& result,
                    int group_size) {
  constexpr int kPart = kPackSize<T> * kRowPacks;
  const int lanes = group_size / kPackSize<T>;
  if (!task.is_even() || !result.is_even() || result.width > kMostThreads * kPart)
    return launch_dependent(op, device, stream, long_norm_kernel<F, T, W>, blocks_for(result.out.count, 1), kThreads,
                            task, result, lanes);
  const bool few = result.width <= kThreads * kPart;
  const int blocks = (few ? kNormBlocks<kThreads> : kNormBlocks<kMostThreads>)*multiprocessors(device);
  launch_dependent(op, device, stream, few ? norm_kernel<kThreads, F, T, W> : norm_kernel<kMostThreads, F, T, W>,
                   blocks_for(result.out.count, 1, blocks), few ? kThreads : kMostThreads, task.even(), result.even(),
                   lanes);
}

// By the type of the weight, T or float32.
template <class F, class T>
void quantize_norms_of(const char* op, rk_device device, rk_stream stream, const NormTask<>& task,
                       const Result<>& result, int group_size, DType weight) {
  if (weight == DType::f32) {
    quantize_norms<F, T, float>(op, device, stream, task, result, group_size);
  } else {
    quantize_norms<F, T, T>(op, device, stream, task, result, group_size);
  }
}

// The arguments of FP8 and INT8 alike.
template <class Args>
NormTask<> norm_task(const Args& args) {
  const rk_tensor& second = args.residual ? *args.residual : *args.input;
  return {Rows(*args.input), Rows(second), data_ptr<char>(*args.weight), args.eps, args.residual != nullptr};
}

}  // namespace radix::quantize
