// Rows that are quantized with a scale each, alone or behind SiLU-and-mul: kernels and their launch.
#pragma once

#include "gpu/device/launch.h"
#include "gpu/device/rows.h"
#include "gpu/quantize/formats.h"

namespace radix::quantize {

constexpr int kThreads = 256, kManyThreads = 1024;
constexpr int kRowPacks = 2;  // of a thread, where a row stays in registers

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

// A block a row, kPacks packs a thread; 0: any number, read twice.
template <int kBlock, int kPacks, class F, class Source>
__global__ void __launch_bounds__(kBlock) row_kernel(Source source, Result result) {
  constexpr int N = Source::N;
  wait_for_previous();
  for (int64_t row = blockIdx.x; row < result.out.count; row += gridDim.x) {
    uint8_t* out = result.out.at<uint8_t>(row);
    const int64_t first = int64_t{threadIdx.x} * N;
    float largest = 0;
    Scale<F> scale;
    if constexpr (kPacks > 0) {
      float v[kPacks][N];
#pragma unroll
      for (int p = 0; p < kPacks; p++)
        if (first + p * kBlock * N < result.width) {
          source.load(row, first + p * kBlock * N, v[p]);
          largest = fmaxf(largest, largest_of<F>(v[p]));
        }
      scale = scale_of<F>(block_reduce<kBlock>(largest, Max()));
#pragma unroll
      for (int p = 0; p < kPacks; p++)
        if (first + p * kBlock * N < result.width) store_quantized<F>(out + first + p * kBlock * N, v[p], scale);
    } else {
      float v[N];
      for (int64_t i = first; i < result.width; i += kBlock * N) {
        source.load(row, i, v);
        largest = fmaxf(largest, largest_of<F>(v));
      }
      scale = scale_of<F>(block_reduce<kBlock>(largest, Max()));
      for (int64_t i = first; i < result.width; i += kBlock * N) {
        source.load(row, i, v);
        store_quantized<F>(out + i, v, scale);
      }
    }
    if (threadIdx.x == 0) *result.scales.at(row, 0) = scale.value;
  }
}

inline Result result_of(const rk_tensor& out, const rk_tensor& scales) {
  return {Rows(out), {Rows(scales), scales.strides[scales.ndim - 1]}, out.shape[out.ndim - 1]};
}

// One scale a row.
template <class F, class Source>
void quantize_rows(const char* op, rk_device device, rk_stream stream, const Source& source, const Result& result) {
  constexpr int kPart = Source::N * kRowPacks;
  const unsigned rows = blocks_for(result.out.count, 1);
  if (result.width <= kThreads * kPart)
    return launch_dependent(op, device, stream, row_kernel<kThreads, kRowPacks, F, Source>, rows, kThreads, source,
                            result);
  const auto kernel = result.width <= kManyThreads * kPart ? row_kernel<kManyThreads, kRowPacks, F, Source>
                                                           : row_kernel<kManyThreads, 0, F, Source>;
  launch_dependent(op, device, stream, kernel, rows, kManyThreads, source, result);
}

// Calls run(source) with what a token's values come from.
template <class T, class Run>
void with_source(const rk_tensor& input, const rk_tensor& out, bool gated, const Run& run) {
  const DeviceRows rows = Rows(input);
  if (gated) {
    run(Gated<T>{rows, out.shape[out.ndim - 1]});
  } else {
    run(Plain<T>{rows});
  }
}

}  // namespace radix::quantize
