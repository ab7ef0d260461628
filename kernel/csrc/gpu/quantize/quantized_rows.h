// Rows that are quantized with a scale each, alone or behind SiLU-and-mul: kernels and their launch.
#pragma once

#include "gpu/device/launch.h"
#include "gpu/device/rows.h"
#include "gpu/quantize/formats.h"

namespace radix::quantize {

constexpr int kThreads = 256;

// A pack of T that waits in registers: in whole ones, for nvcc takes an array of 16-bit elements apart and puts it
// together again wherever control flow meets. Not on AMD: widen_pack() says why.
#if defined(__HIP__)
template <class T>
using Waiting = Pack<T, kPackSize<T>>;

template <class T, int N>
__device__ inline void widen_waiting(const Waiting<T>& pack, float (&v)[N]) {
  widen_pack(pack, v);
}
template <class T>
__device__ inline void wait_narrow(Waiting<T>&) {}
#else
template <class T>
using Waiting = Pack<uint32_t, 4>;

template <class T, int N>
__device__ inline void widen_waiting(const Waiting<T>& words, float (&v)[N]) {
  Pack<T, N> pack;
  static_assert(sizeof(pack) == sizeof(words));
  memcpy(&pack, &words, sizeof(pack));
  widen_pack(pack, v);
}

// From here on nvcc knows nothing of the words: what they were widened to, twice as many registers, is not kept.
template <class T>
__device__ inline void wait_narrow(Waiting<T>& words) {
#pragma unroll
  for (int i = 0; i < 4; i++) asm volatile("" : "+r"(words.at[i]));
}
#endif

template <class T>
__device__ inline Waiting<T> load_waiting(const T* p) {
  return *reinterpret_cast<const Waiting<T>*>(p);
}

// x / y for y >= 1, as __fdividef() has it, which would look for denominators close to 0 first.
__device__ inline float divided(float x, float y) {
#if defined(__HIP__)
  return __fdividef(x, y);
#else
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y));
  return x * inverse;
#endif
}

// What is quantized: N values of a row from a column on. A thread fetches all that it has of a row before it waits for
// any of it; what it holds of it then, until the row's scale is known, is `Held`. kMany: packs whose Held fill the
// registers of a thread, 64.
template <class T, class R = DeviceRows>
struct Plain {
  R input;
  static constexpr int N = kPackSize<T>, kMany = 8;
  using Fetched = Waiting<T>;
  using Held = Fetched;

  Plain<T, EvenRows> even() const { return {EvenRows(input)}; }
  __device__ Fetched fetch(int64_t row, int64_t column) const {
    return load_waiting(input.template at<T>(row) + column);
  }
  __device__ static Held hold(const Fetched& x) { return x; }
  __device__ static void read(const Held& x, float (&v)[N]) { widen_waiting<T>(x, v); }
  __device__ static void wait(Held& x) { wait_narrow<T>(x); }
};
template <class T, class R = DeviceRows>
struct Gated {
  R input;
  int64_t width;  // columns of the result
  static constexpr int N = kPackSize<T>, kMany = 4;
  struct Fetched {
    Waiting<T> gate, up;
  };
  struct Held {
    float at[N];
  };

  Gated<T, EvenRows> even() const { return {EvenRows(input), width}; }
  __device__ Fetched fetch(int64_t row, int64_t column) const {
    const T* x = input.template at<T>(row) + column;
    return {load_waiting(x), load_waiting(x + width)};
  }
  __device__ static Held hold(const Fetched& x) {
    float gate[N];
    Held held;
    widen_waiting<T>(x.gate, gate);
    widen_waiting<T>(x.up, held.at);
#pragma unroll
    for (int j = 0; j < N; j++) held.at[j] *= divided(gate[j], 1.f + exponential(-gate[j]));
    return held;
  }
  __device__ static void read(const Held& x, float (&v)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = x.at[j];
  }
  __device__ static void wait(Held&) {}
};

template <class Source>
__device__ inline void read_values(const Source& source, int64_t row, int64_t column, float (&v)[Source::N]) {
  Source::read(Source::hold(source.fetch(row, column)), v);
}

// Scales in a tensor of free strides, the last one in elements.
template <class R>
struct ScaleRows {
  R rows;
  int64_t step;
  __device__ float* at(int64_t row, int64_t group) const { return rows.template at<float>(row) + group * step; }
};

template <class R = DeviceRows>
struct Result {
  R out;
  ScaleRows<R> scales;
  int64_t width;

  bool is_even() const { return out.even() && scales.rows.even(); }
  Result<EvenRows> even() const { return {EvenRows(out), {EvenRows(scales.rows), scales.step}, width}; }
};

// A block a row, kPacks packs a thread, and no more threads than that takes: a row is read once.
template <int kPacks, class F, class Source>
__global__ void __launch_bounds__(kMostThreads) row_kernel(Source source, Result<EvenRows> result) {
  constexpr int N = Source::N;
  const int width = static_cast<int>(result.width), row = blockIdx.x;
  const auto column = [&](int p) { return static_cast<int>(p * blockDim.x + threadIdx.x) * N; };
  typename Source::Fetched fetched[kPacks];
  typename Source::Held held[kPacks];
  float v[N], largest = 0;
  wait_for_previous();
  // Where a thread has no pack left it takes the row's last one, which changes no maximum: no branch, in which a load
  // could be waited for, stands between the loads.
#pragma unroll
  for (int p = 0; p < kPacks; p++) fetched[p] = source.fetch(row, min(column(p), width - N));
#pragma unroll
  for (int p = 0; p < kPacks; p++) {
    held[p] = Source::hold(fetched[p]);
    Source::read(held[p], v);
    largest = largest_of<F>(v, largest);
    Source::wait(held[p]);
  }
  const Scale<F> scale = scale_of<F>(largest_of_block(largest));
  uint8_t* out = result.out.template at<uint8_t>(row);
#pragma unroll
  for (int p = 0; p < kPacks; p++) {
    if (column(p) >= width) continue;
    Source::read(held[p], v);
    store_quantized<F>(out + column(p), v, scale);
  }
  if (threadIdx.x == 0) *result.scales.at(row, 0) = scale.value();
}

// Rows of any steps, lengths and number, read twice, the second time from L1 or L2.
template <class F, class Source>
__global__ void __launch_bounds__(kMostThreads) long_row_kernel(Source source, Result<> result) {
  constexpr int N = Source::N;
  wait_for_previous();
  for (int64_t row = blockIdx.x; row < result.out.count; row += gridDim.x) {
    uint8_t* out = result.out.at<uint8_t>(row);
    float v[N], largest = 0;
    for (int64_t i = int64_t{threadIdx.x} * N; i < result.width; i += blockDim.x * N) {
      read_values(source, row, i, v);
      largest = largest_of<F>(v, largest);
    }
    const Scale<F> scale = scale_of<F>(largest_of_block(largest));
    for (int64_t i = int64_t{threadIdx.x} * N; i < result.width; i += blockDim.x * N) {
      read_values(source, row, i, v);
      store_quantized<F>(out + i, v, scale);
    }
    if (threadIdx.x == 0) *result.scales.at(row, 0) = scale.value();
    __syncthreads();  // for the next row's largest
  }
}

inline Result<> result_of(const rk_tensor& out, const rk_tensor& scales) {
  return {Rows(out), {Rows(scales), scales.strides[scales.ndim - 1]}, out.shape[out.ndim - 1]};
}

// Whole warps for `packs` packs, `each` of them a thread.
inline int threads_for(int64_t packs, int each) {
  const int64_t warps = (packs + int64_t{RK_WARP} * each - 1) / (int64_t{RK_WARP} * each);
  return static_cast<int>(warps) * RK_WARP;
}

// One scale a row. While all rows are on the chip at once, many threads are done with each of them soonest. Of more
// rows, those in few threads with many packs have the most bytes under way, and the least to do besides; a row that
// does not fill a warp so stays with few packs.
template <class F, class Source>
void quantize_rows(const char* op, rk_device device, rk_stream stream, const Source& source, const Result<>& result) {
  constexpr int kFew = 2, kMany = Source::kMany;
  constexpr int64_t kMost = kFew * kMostThreads, kMostInGrid = int64_t{1} << 31;
  using Even = decltype(source.even());
  const int64_t packs = result.width / Source::N, rows = result.out.count;
  const bool at_once = packs <= kMost && rows <= kMost * multiprocessors(device) / packs;
  const bool few = at_once || packs < kMany * RK_WARP;
  const int threads = threads_for(packs, few ? kFew : kMany);
  if (source.input.even() && result.is_even() && threads <= kMostThreads && rows < kMostInGrid / threads)
    return launch_dependent(op, device, stream, few ? row_kernel<kFew, F, Even> : row_kernel<kMany, F, Even>,
                            static_cast<unsigned>(rows), threads, source.even(), result.even());
  launch_dependent(op, device, stream, long_row_kernel<F, Source>, blocks_for(rows, 1),
                   packs < kMostThreads ? threads_for(packs, 1) : kMostThreads, source, result);
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
