// RoPE on the GPU, a block a token, its threads over (head, pair). Bound by bytes.
#include "api/rope.h"
#include "common/tensor.h"
#include "gpu/element.h"
#include "gpu/launch.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 128;

struct Heads {
  char* data;  // NULL: no such tensor
  int64_t token_stride, head_stride, count;

  // [T, H * D] or [T, H, D]
  static Heads of(const rk_tensor* t, int64_t head_size) {
    if (!t) return {nullptr, 0, 0, 0};
    const int64_t item = element_size(*t);
    if (t->ndim == 3) return {data_ptr<char>(*t), t->strides[0] * item, t->strides[1] * item, t->shape[1]};
    return {data_ptr<char>(*t), t->strides[0] * item, head_size * item, t->shape[1] / head_size};
  }
};

struct Task {
  Heads query, key;
  const void* positions;
  int64_t positions_stride;
  bool wide_positions, is_neox;
  const float* cos_sin;
  int64_t cos_sin_stride, max_position, tokens, half;
};

template <class T>
__device__ void rotate(T* x, int64_t pair, const Task& task, const float* cos_sin) {
  const int64_t first = task.is_neox ? pair : 2 * pair, second = task.is_neox ? pair + task.half : 2 * pair + 1;
  const float c = cos_sin[pair], s = cos_sin[task.half + pair];
  const float a = to_float(x[first]), b = to_float(x[second]);
  from_float(a * c - b * s, x[first]);
  from_float(b * c + a * s, x[second]);
}

template <class T>
__global__ void __launch_bounds__(kThreads) rope_kernel(Task task) {
  for (int64_t t = blockIdx.x; t < task.tokens; t += gridDim.x) {
    const int64_t at = t * task.positions_stride;
    const int64_t position = task.wide_positions ? static_cast<const int64_t*>(task.positions)[at]
                                                 : static_cast<const int32_t*>(task.positions)[at];
    if (position < 0 || position >= task.max_position) continue;  // the host cannot look without a synchronisation
    const float* cos_sin = task.cos_sin + position * task.cos_sin_stride;
    const int64_t queries = task.query.count * task.half, all = queries + task.key.count * task.half;
    for (int64_t i = threadIdx.x; i < all; i += kThreads) {
      const Heads& heads = i < queries ? task.query : task.key;
      const int64_t j = i < queries ? i : i - queries;
      char* head = heads.data + t * heads.token_stride + j / task.half * heads.head_stride;
      rotate(reinterpret_cast<T*>(head), j % task.half, task, cos_sin);
    }
  }
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
                  args.is_neox != 0,
                  data_ptr<float>(cache),
                  cache.strides[0],
                  cache.shape[0],
                  positions.shape[0],
                  cache.shape[1] / 2};
  if (task.tokens == 0 || task.half == 0) return;
  dispatch_float(dtype_of(*args.query), [&](auto t) {
    launch("apply_rope_inplace", args.query->device, stream, rope_kernel<typename decltype(t)::type>,
           blocks_for(task.tokens, 1), kThreads, task);
  });
}

}  // namespace backend
}  // namespace radix
