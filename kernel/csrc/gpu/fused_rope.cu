// Q/K norm, RoPE and KV store on the GPU in one pass. Bound by bytes: every element is read once and written once.
//
// kLanes lanes of a warp share a head of one token: of q (in place), of k or of v (to the cache). A lane holds kUnits
// units in registers; a unit is two packs of N elements: the partners of a rotation, or what lies beyond it.
#include "api/fused_rope.h"
#include "common/tensor.h"
#include "gpu/element.h"
#include "gpu/launch.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 256;

// [T, H, D] or, with pages for tokens, [pages, page_size, H, D]; strides in bytes.
struct Heads {
  char* data;
  int64_t token, head;
};
struct Slots {
  char* data;
  int64_t page, slot, head;
};

struct Task {
  Heads q, k, v;
  Slots k_cache, v_cache;
  const void *q_weight, *k_weight;  // NULL: no norm
  bool wide_weight, wide_positions, is_neox;
  const float* cos_sin;
  const void* positions;
  const int64_t* slots;
  int64_t cos_sin_stride, positions_stride, slots_stride, max_position, num_slots, page_size, tokens;
  int q_heads, kv_heads, dim, half;
  float eps;
};

// Where the two packs of unit u begin, and whether they are rotated.
struct Unit {
  int first, second;
  bool rotated;
};

template <int N>
__device__ Unit unit_at(int u, const Task& task) {
  const int rotary = 2 * task.half;
  if (!task.is_neox) return {2 * u * N, (2 * u + 1) * N, 2 * u * N < rotary};
  if (u * N < task.half) return {u * N, task.half + u * N, true};
  const int rest = rotary + 2 * (u * N - task.half);
  return {rest, rest + N, false};
}

template <int N, class W>
__device__ void multiply(float (&x)[N], const W* weight, float scale) {
  W w[N];
  load_wide<(N == 1 ? 1 : kPackSize<W> < N ? kPackSize<W> : N)>(weight, w);
#pragma unroll
  for (int j = 0; j < N; j++) x[j] *= scale * to_float(w[j]);
}

// Partners are a[j], b[j]; without neox neighbours in the sequence a, b.
template <int N>
__device__ void rotate(float (&a)[N], float (&b)[N], const float* cos_sin, const Task& task, const Unit& unit) {
  const int pair = task.is_neox ? unit.first : unit.first / 2;
  float c[N], s[N];
  load_wide<(N == 1 ? 1 : 4)>(cos_sin + pair, c);
  load_wide<(N == 1 ? 1 : 4)>(cos_sin + task.half + pair, s);
  const auto turn = [](float& x, float& y, float cos, float sin) {
    const float low = x, high = y;
    x = low * cos - high * sin;
    y = high * cos + low * sin;
  };
  if (task.is_neox || N == 1) {
#pragma unroll
    for (int j = 0; j < N; j++) turn(a[j], b[j], c[j], s[j]);
  } else if constexpr (N > 1) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      turn(a[j], a[j + 1], c[j / 2], s[j / 2]);
      turn(b[j], b[j + 1], c[(N + j) / 2], s[(N + j) / 2]);
    }
  }
}

// Head h of a token's q, k and v, one after the other.
template <class T>
__device__ const T* source(const Task& task, int64_t token, int h) {
  if (h < task.q_heads) return reinterpret_cast<const T*>(task.q.data + token * task.q.token + h * task.q.head);
  h -= task.q_heads;
  if (h < task.kv_heads) return reinterpret_cast<const T*>(task.k.data + token * task.k.token + h * task.k.head);
  h -= task.kv_heads;
  return reinterpret_cast<const T*>(task.v.data + token * task.v.token + h * task.v.head);
}

// What becomes of a head.
template <class T>
struct Target {
  T* to = nullptr;                 // NULL: it is skipped
  const void* weight = nullptr;    // NULL: no norm
  const float* cos_sin = nullptr;  // NULL: no rotation
};

template <class T>
__device__ Target<T> target_of(const Task& task, int64_t token, int h) {
  const int64_t at = token * task.positions_stride;
  const int64_t position = task.wide_positions ? static_cast<const int64_t*>(task.positions)[at]
                                               : static_cast<const int32_t*>(task.positions)[at];
  const int64_t slot = task.slots[token * task.slots_stride];
  if (position < 0 || position >= task.max_position || slot < -1 || slot >= task.num_slots) return {};
  const float* cos_sin = task.cos_sin + position * task.cos_sin_stride;
  if (h < task.q_heads)
    return {reinterpret_cast<T*>(task.q.data + token * task.q.token + h * task.q.head), task.q_weight, cos_sin};
  if (slot < 0) return {};
  const int64_t page = slot / task.page_size, offset = slot - page * task.page_size;
  const auto place = [page, offset](const Slots& x, int head) {
    return reinterpret_cast<T*>(x.data + page * x.page + offset * x.slot + head * x.head);
  };
  h -= task.q_heads;
  if (h < task.kv_heads) return {place(task.k_cache, h), task.k_weight, cos_sin};
  return {place(task.v_cache, h - task.kv_heads), nullptr, nullptr};
}

// All lanes of a warp run it together: the sum is over the kLanes lanes of a group. The elements are asked for before
// the position and the slot, so that the two trips to memory overlap.
template <int kLanes, int kUnits, int N, class T>
__device__ void process(const Task& task, bool inside, int64_t token, int h) {
  const int lane = threadIdx.x % kLanes, units = inside ? task.dim / (2 * N) : 0;
  Pack<T, N> low[kUnits], high[kUnits];
  const T* from = source<T>(task, token, h);
#pragma unroll
  for (int i = 0; i < kUnits; i++) {
    const int u = lane + i * kLanes;
    if (u >= units) continue;
    const Unit unit = unit_at<N>(u, task);
    low[i] = load_pack<N>(from + unit.first);
    high[i] = load_pack<N>(from + unit.second);
  }
  const Target<T> target = inside ? target_of<T>(task, token, h) : Target<T>{};
  float a[kUnits][N], b[kUnits][N];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kUnits; i++) {
    if (lane + i * kLanes >= units) continue;
#pragma unroll
    for (int j = 0; j < N; j++) {
      a[i][j] = to_float(low[i].at[j]);
      b[i][j] = to_float(high[i].at[j]);
      sum += a[i][j] * a[i][j] + b[i][j] * b[i][j];
    }
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask >>= 1) sum += shuffle_xor(sum, mask);
  const float scale = 1.f / sqrtf(sum / static_cast<float>(task.dim) + task.eps);
  if (!target.to) return;
#pragma unroll
  for (int i = 0; i < kUnits; i++) {
    const int u = lane + i * kLanes;
    if (u >= units) continue;
    const Unit unit = unit_at<N>(u, task);
    if (target.weight && task.wide_weight) {
      multiply(a[i], static_cast<const float*>(target.weight) + unit.first, scale);
      multiply(b[i], static_cast<const float*>(target.weight) + unit.second, scale);
    } else if (target.weight) {
      multiply(a[i], static_cast<const T*>(target.weight) + unit.first, scale);
      multiply(b[i], static_cast<const T*>(target.weight) + unit.second, scale);
    }
    if (target.cos_sin && unit.rotated) rotate(a[i], b[i], target.cos_sin, task, unit);
#pragma unroll
    for (int j = 0; j < N; j++) {
      from_float(a[i][j], low[i].at[j]);
      from_float(b[i][j], high[i].at[j]);
    }
    store_pack<N>(target.to + unit.first, low[i]);
    store_pack<N>(target.to + unit.second, high[i]);
  }
}

template <int kLanes, int kUnits, int N, class T>
__global__ void __launch_bounds__(kThreads, kUnits == 1 ? 4 : 2) fused_kernel(Task task) {
  wait_for_previous();
  constexpr int kGroups = kThreads / kLanes;
  const int items = task.q_heads + 2 * task.kv_heads;
  const int64_t total = task.tokens * items;
  for (int64_t first = int64_t{blockIdx.x} * kGroups; first < total; first += int64_t{gridDim.x} * kGroups) {
    const int64_t item = first + threadIdx.x / kLanes, token = item / items;
    process<kLanes, kUnits, N, T>(task, item < total, token, static_cast<int>(item - token * items));
  }
}

Heads heads_of(const rk_tensor& t) {
  const int64_t item = element_size(t);
  return {data_ptr<char>(t), t.strides[0] * item, t.strides[1] * item};
}

Slots slots_of(const rk_tensor& t) {
  const int64_t item = element_size(t);
  return {data_ptr<char>(t), t.strides[0] * item, t.strides[1] * item, t.strides[2] * item};
}

bool aligned(const Task& task) {
  const auto address = [](const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)); };
  int64_t bits = address(task.q_weight) | address(task.k_weight) | address(task.cos_sin) | task.cos_sin_stride * 4;
  for (const Heads* x : {&task.q, &task.k, &task.v}) bits |= address(x->data) | x->token | x->head;
  for (const Slots* x : {&task.k_cache, &task.v_cache}) bits |= address(x->data) | x->page | x->slot | x->head;
  return bits % 16 == 0;
}

struct Choice {
  void (*kernel)(Task);
  int lanes;
};

template <class T>
Choice choose(const Task& task) {
  constexpr int N = kPackSize<T>;
  const int units = task.dim / (2 * N);
  if (!aligned(task) || task.dim % (2 * N) != 0 || task.half % N != 0) return {fused_kernel<16, 8, 1, T>, 16};
  if (units <= 8) return {fused_kernel<8, 1, N, T>, 8};
  return {fused_kernel<16, 2, N, T>, 16};
}

}  // namespace

namespace backend {

void fused_qk_norm_rope_store(const rk_fused_qk_norm_rope_store_args& args, rk_stream stream) {
  const rk_tensor &q = *args.q, &table = *args.cos_sin_cache;
  Task task{};
  task.q = heads_of(q);
  task.k = heads_of(*args.k);
  task.v = heads_of(*args.v);
  task.k_cache = slots_of(*args.k_cache);
  task.v_cache = slots_of(*args.v_cache);
  if (args.q_weight) {
    task.q_weight = data_ptr<void>(*args.q_weight);
    task.k_weight = data_ptr<void>(*args.k_weight);
    task.wide_weight = dtype_of(*args.q_weight) == DType::f32;
  }
  task.wide_positions = dtype_of(*args.positions) == DType::i64;
  task.is_neox = args.is_neox != 0;
  task.cos_sin = data_ptr<float>(table);
  task.positions = data_ptr<void>(*args.positions);
  task.slots = data_ptr<int64_t>(*args.slot_mapping);
  task.cos_sin_stride = table.strides[0];
  task.positions_stride = args.positions->strides[0];
  task.slots_stride = args.slot_mapping->strides[0];
  task.max_position = table.shape[0];
  task.page_size = args.k_cache->shape[1];
  task.num_slots = args.k_cache->shape[0] * task.page_size;
  task.tokens = q.shape[0];
  task.q_heads = static_cast<int>(q.shape[1]);
  task.kv_heads = static_cast<int>(args.k->shape[1]);
  task.dim = static_cast<int>(q.shape[2]);
  task.half = static_cast<int>(table.shape[1] / 2);
  task.eps = args.eps;
  dispatch_float(dtype_of(q), [&](auto t) {
    const Choice choice = choose<typename decltype(t)::type>(task);
    launch_dependent("fused_qk_norm_rope_store", q.device, stream, choice.kernel,
                     blocks_for(task.tokens * (task.q_heads + 2 * task.kv_heads), kThreads / choice.lanes), kThreads,
                     task);
  });
}

}  // namespace backend
}  // namespace radix
