// RoPE on the GPU. Bound by bytes: a thread rotates N pairs with 16-byte accesses where shapes and addresses allow.
#include "api/rope.h"
#include "common/tensor.h"
#include "gpu/device/element.h"
#include "gpu/device/launch.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 512;

struct Heads {
  char* data;  // NULL: no such tensor
  int64_t token_stride, head_stride;
  int count;

  // [T, H * D] or [T, H, D]
  static Heads of(const rk_tensor* t, int64_t head_size) {
    if (!t) return {nullptr, 0, 0, 0};
    const int64_t item = element_size(*t);
    if (t->ndim == 3)
      return {data_ptr<char>(*t), t->strides[0] * item, t->strides[1] * item, static_cast<int>(t->shape[1])};
    return {data_ptr<char>(*t), t->strides[0] * item, head_size * item, static_cast<int>(t->shape[1] / head_size)};
  }

  bool aligned() const { return (reinterpret_cast<uintptr_t>(data) | token_stride | head_stride) % 16 == 0; }
};

struct Task {
  Heads query, key;
  const void* positions;
  int64_t positions_stride;
  bool wide_positions;
  const float* cos_sin;
  int64_t cos_sin_stride, max_position, tokens;
  int half;
};

// Pairs (i, i + half), i from `first`.
template <int N, class T>
__device__ void rotate_halves(T* x, const float* cos_sin, int half, int first) {
  constexpr int kFloats = N == 1 ? 1 : 4;
  float c[N], s[N];
  load_wide<kFloats>(cos_sin + first, c);
  load_wide<kFloats>(cos_sin + half + first, s);
  auto a = load_pack<N>(x + first), b = load_pack<N>(x + half + first);
#pragma unroll
  for (int j = 0; j < N; j++) {
    const float low = to_float(a.at[j]), high = to_float(b.at[j]);
    from_float(low * c[j] - high * s[j], a.at[j]);
    from_float(high * c[j] + low * s[j], b.at[j]);
  }
  store_pack<N>(x + first, a);
  store_pack<N>(x + half + first, b);
}

// Pairs (2i, 2i + 1), i from `first`.
template <int N, class T>
__device__ void rotate_neighbours(T* x, const float* cos_sin, int half, int first) {
  constexpr int kFloats = N == 1 ? 1 : 4;
  float c[N], s[N];
  load_wide<kFloats>(cos_sin + first, c);
  load_wide<kFloats>(cos_sin + half + first, s);
  constexpr int kStep = N == 1 ? 1 : kPackSize<T>;  // N == 1: no more than the alignment of an element
  T pairs[2 * N];
  load_wide<kStep>(x + 2 * first, pairs);
#pragma unroll
  for (int j = 0; j < N; j++) {
    const float low = to_float(pairs[2 * j]), high = to_float(pairs[2 * j + 1]);
    from_float(low * c[j] - high * s[j], pairs[2 * j]);
    from_float(high * c[j] + low * s[j], pairs[2 * j + 1]);
  }
  store_wide<kStep>(x + 2 * first, pairs);
}

// threadIdx.x over the pairs of a head, N at a time; threadIdx.y over the heads of a token; a block a token.
template <bool kNeox, int N, class T>
__global__ void __launch_bounds__(kThreads) rope_kernel(Task task) {
  wait_for_previous();
  for (int64_t t = blockIdx.x; t < task.tokens; t += gridDim.x) {
    const int64_t at = t * task.positions_stride;
    const int64_t position = task.wide_positions ? static_cast<const int64_t*>(task.positions)[at]
                                                 : static_cast<const int32_t*>(task.positions)[at];
    if (position < 0 || position >= task.max_position) continue;  // the host cannot look without a synchronisation
    const float* cos_sin = task.cos_sin + position * task.cos_sin_stride;
    for (int h = threadIdx.y; h < task.query.count + task.key.count; h += blockDim.y) {
      const Heads& heads = h < task.query.count ? task.query : task.key;
      const int head = h < task.query.count ? h : h - task.query.count;
      T* x = reinterpret_cast<T*>(heads.data + t * heads.token_stride + head * heads.head_stride);
      for (int i = threadIdx.x * N; i < task.half; i += blockDim.x * N) {
        if constexpr (kNeox) {
          rotate_halves<N>(x, cos_sin, task.half, i);
        } else {
          rotate_neighbours<N>(x, cos_sin, task.half, i);
        }
      }
    }
  }
}

template <class T>
auto kernel_for(bool neox, bool packed) {
  constexpr int N = kPackSize<T>;
  if (packed) return neox ? rope_kernel<true, N, T> : rope_kernel<false, N, T>;
  return neox ? rope_kernel<true, 1, T> : rope_kernel<false, 1, T>;
}

}  // namespace

namespace backend {

void apply_rope_inplace(const rk_apply_rope_inplace_args& args, rk_stream stream) {
  const rk_tensor &positions = *args.positions, &cache = *args.cos_sin_cache;
  const Task task{Heads::of(args.query, args.head_size),
                  Heads::of(args.key, args.head_size),
                  data_ptr<void>(positions),
                  positions.strides[0],
                  dtype_of(positions) == DType::i64,
                  data_ptr<float>(cache),
                  cache.strides[0],
                  cache.shape[0],
                  positions.shape[0],
                  static_cast<int>(cache.shape[1] / 2)};
  if (task.tokens == 0 || task.half == 0) return;
  dispatch_float(dtype_of(*args.query), [&](auto t) {
    using T = typename decltype(t)::type;
    const bool table_aligned = reinterpret_cast<uintptr_t>(task.cos_sin) % 16 == 0 && task.cos_sin_stride % 4 == 0;
    const bool packed = task.half % kPackSize<T> == 0 && task.query.aligned() && task.key.aligned() && table_aligned;
    const int steps = packed ? task.half / kPackSize<T> : task.half;
    const int across = steps < 64 ? steps : 64;
    // All heads of a token at once or, where those are too many, in turns of one size.
    const int heads = task.query.count + task.key.count, rows = kThreads / across;
    const int turns = (heads + rows - 1) / rows;
    const dim3 block(across, turns > 0 ? (heads + turns - 1) / turns : 1);
    launch_dependent("apply_rope_inplace", args.query->device, stream, kernel_for<T>(args.is_neox != 0, packed),
                     blocks_for(task.tokens, 1), block, task);
  });
}

}  // namespace backend
}  // namespace radix
