// RMSNorm on the GPU. Bound by bytes: a row is read once and stays in registers between the two passes.
//
// Short rows (up to 4 packs of 16 bytes a lane) belong to a warp, longer ones to a block; what is longer still, or
// cannot be read 16 bytes at a time, is read twice, the second time from L1 or L2.
#include "api/norm.h"
#include "gpu/device/element.h"
#include "gpu/device/launch.h"
#include "gpu/device/reduce.h"
#include "gpu/device/rows.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 256;
constexpr int64_t kFewRows = 1024;  // of up to 128 packs

// Threads of a block whose rows belong to groups of kGroup: a warp, half a block or the block.
template <int kGroup>
constexpr int kBlock = kGroup == RK_WARP ? kThreads : kGroup;

// One call. Without kAdd: out = norm(input). With it: residual (`second`) += input, input = norm(residual).
struct Task {
  DeviceRows input, second;
  const void* weight;
  int64_t n;
  float eps;
};

__device__ inline float scale_of(float sum, int64_t n, float eps) {
  return 1.f / sqrtf(sum / static_cast<float>(n) + eps);
}

// What is normalized, at one of its elements: x, or the sum of x and `other` before it is rounded.
template <bool kAdd, int N, class T>
__device__ float value_of(const Pack<T, N>& x, const Pack<T, N>& other, int j) {
  if constexpr (kAdd) return to_float(x.at[j]) + to_float(other.at[j]);
  return to_float(x.at[j]);
}

template <bool kAdd, int N, class T>
__device__ float squares(const Pack<T, N>& x, const Pack<T, N>& other) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < N; j++) {
    const float value = value_of<kAdd>(x, other, j);
    sum += value * value;
  }
  return sum;
}

template <int N, class T>
__device__ Pack<T, N> rounded_sum(const Pack<T, N>& x, const Pack<T, N>& other) {
  Pack<T, N> sum;
#pragma unroll
  for (int j = 0; j < N; j++) from_float(value_of<true>(x, other, j), sum.at[j]);
  return sum;
}

template <int N, class W>
__device__ void load_weight(const W* weight, W (&w)[N]) {
  load_wide<(kPackSize<W> < N ? kPackSize<W> : N)>(weight, w);
}

template <bool kAdd, int N, class T, class W>
__device__ Pack<T, N> scaled(const Pack<T, N>& x, const Pack<T, N>& other, const W (&w)[N], float scale) {
  Pack<T, N> out;
#pragma unroll
  for (int j = 0; j < N; j++) from_float(value_of<kAdd>(x, other, j) * scale * to_float(w[j]), out.at[j]);
  return out;
}

// kGroup threads (a warp or the block) share a row of at most kGroup * kPacks packs.
template <bool kAdd, int kGroup, int kPacks, class T, class W>
__global__ void __launch_bounds__(kBlock<kGroup>) register_kernel(Task task) {
  constexpr int N = kPackSize<T>, kRows = kBlock<kGroup> / kGroup;
  const int lane = threadIdx.x % kGroup, packs = static_cast<int>(task.n) / N;
  // A few bytes of weight are read before the wait: no kernel in flight writes them. More would cost occupancy.
  constexpr bool kEarly = kPacks * N * sizeof(W) <= (kGroup == 128 ? 64 : 32);
  const W* weight = static_cast<const W*>(task.weight);
  W early[kEarly ? kPacks : 1][N];
  if constexpr (kEarly) {
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      const int i = lane + p * kGroup;
      if (i < packs) load_weight(weight + i * N, early[p]);
    }
  }
  wait_for_previous();
  for (int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / kGroup; row < task.input.count;
       row += int64_t{gridDim.x} * kRows) {
    T *input = task.input.at<T>(row), *second = task.second.at<T>(row);
    Pack<T, N> x[kPacks], other[kPacks];  // other: with kAdd
    float sum = 0;
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      const int i = lane + p * kGroup;
      if (i >= packs) continue;
      x[p] = load_pack<N>(input + i * N);
      if constexpr (kAdd) other[p] = load_pack<N>(second + i * N);
    }
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      const int i = lane + p * kGroup;
      if (i >= packs) continue;
      if constexpr (kAdd) store_pack<N>(second + i * N, rounded_sum(x[p], other[p]));
      sum += squares<kAdd>(x[p], other[p]);
    }
    if constexpr (kGroup == RK_WARP) {
      sum = warp_reduce(sum, Sum());
    } else {
      sum = block_reduce<kGroup>(sum, Sum());
    }
    const float scale = scale_of(sum, task.n, task.eps);
    T* out = kAdd ? input : second;
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      const int i = lane + p * kGroup;
      if (i >= packs) continue;
      if constexpr (kEarly) {
        store_pack<N>(out + i * N, scaled<kAdd>(x[p], other[p], early[p], scale));
      } else {
        W w[N];
        load_weight(weight + i * N, w);
        store_pack<N>(out + i * N, scaled<kAdd>(x[p], other[p], w, scale));
      }
    }
  }
}

// A block a row of any length, read twice. A thread writes just the elements that it alone reads.
template <bool kAdd, int N, class T, class W>
__global__ void __launch_bounds__(kThreads) memory_kernel(Task task) {
  const W* weight = static_cast<const W*>(task.weight);
  wait_for_previous();
  for (int64_t row = blockIdx.x; row < task.input.count; row += gridDim.x) {
    T *input = task.input.at<T>(row), *second = task.second.at<T>(row);
    float sum = 0;
    for (int64_t i = int64_t{threadIdx.x} * N; i < task.n; i += kThreads * N) {
      Pack<T, N> other;
      const auto x = load_pack<N>(input + i);
      if constexpr (kAdd) other = load_pack<N>(second + i);
      sum += squares<kAdd>(x, other);
    }
    const float scale = scale_of(block_reduce<kThreads>(sum, Sum()), task.n, task.eps);
    T* out = kAdd ? input : second;
    for (int64_t i = int64_t{threadIdx.x} * N; i < task.n; i += kThreads * N) {
      W w[N];
      Pack<T, N> other;
      load_weight(weight + i, w);
      const auto x = load_pack<N>(input + i);
      if constexpr (kAdd) {
        other = load_pack<N>(second + i);
        store_pack<N>(second + i, rounded_sum(x, other));
      }
      store_pack<N>(out + i, scaled<kAdd>(x, other, w, scale));
    }
  }
}

struct Choice {
  void (*kernel)(Task);
  int rows, threads;  // of a block
};

template <bool kAdd, int kGroup, int kPacks, class T, class W>
Choice registers() {
  return {register_kernel<kAdd, kGroup, kPacks, T, W>, kBlock<kGroup> / kGroup, kBlock<kGroup>};
}

template <bool kAdd, class T, class W>
Choice choose(const Task& task) {
  constexpr int N = kPackSize<T>;
  const bool packed = task.n % N == 0 && task.input.aligned(16) && task.second.aligned(16) &&
                      reinterpret_cast<uintptr_t>(task.weight) % 16 == 0;
  const int64_t packs = task.n / N;
  if (!packed) return {memory_kernel<kAdd, 1, T, W>, 1, kThreads};
  if (packs <= RK_WARP) return registers<kAdd, RK_WARP, 1, T, W>();
  // A block a row has a shorter way to the end of its row, a warp a row less to do for its sum: few rows, or many that
  // have too little else to do.
  if (packs <= 128 && (task.input.count <= kFewRows || (kAdd && packs > 96))) return registers<kAdd, 128, 1, T, W>();
  if (packs <= 4 * RK_WARP) return registers<kAdd, RK_WARP, 4, T, W>();
  // Half as many threads with twice the bytes in flight each: less of a row's time goes into its sum. With a second
  // input there are enough in flight either way.
  if (packs <= 512) {
    if constexpr (kAdd) {
      return registers<kAdd, 256, 2, T, W>();
    } else {
      return registers<kAdd, 128, 4, T, W>();
    }
  }
  if (packs <= 4 * kThreads) return registers<kAdd, kThreads, 4, T, W>();
  return {memory_kernel<kAdd, N, T, W>, 1, kThreads};
}

template <bool kAdd>
void run(const char* op, const rk_tensor& input, const rk_tensor& second, const rk_tensor& weight, float eps,
         rk_stream stream) {
  const Task task{Rows(input), Rows(second), data_ptr<void>(weight), input.shape[input.ndim - 1], eps};
  dispatch_float(dtype_of(input), [&](auto t) {
    using T = typename decltype(t)::type;
    const Choice choice = dtype_of(weight) == DType::f32 ? choose<kAdd, T, float>(task) : choose<kAdd, T, T>(task);
    launch_dependent(op, input.device, stream, choice.kernel, blocks_for(task.input.count, choice.rows), choice.threads,
                     task);
  });
}

}  // namespace

namespace backend {

void rmsnorm(const rk_rmsnorm_args& args, rk_stream stream) {
  run<false>("rmsnorm", *args.input, *args.out, *args.weight, args.eps, stream);
}

void fused_add_rmsnorm(const rk_fused_add_rmsnorm_args& args, rk_stream stream) {
  run<true>("fused_add_rmsnorm", *args.input, *args.residual, *args.weight, args.eps, stream);
}

}  // namespace backend
}  // namespace radix
