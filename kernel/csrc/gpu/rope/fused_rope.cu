// Q/K norm, RoPE and KV store on the GPU in one pass. Bound by bytes: every element is read once and written once.
//
// kLanes lanes of a warp share a head of one token: of q (in place), of k or of v (to the cache). A lane holds kUnits
// units in registers; a unit is two packs of N elements: the partners of a rotation, or what lies beyond it.
#include "api/fused_rope.h"

#include <type_traits>

#include "common/tensor.h"
#include "gpu/device/element.h"
#include "gpu/device/fp8.h"
#include "gpu/device/launch.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 128;

// Of a multiprocessor. The grid is no larger: a block goes on to further heads, which costs less than its start.
template <int kUnits>
constexpr int kBlocks = kUnits == 1 ? 8 : 4;
// The second launch bound: blocks of a multiprocessor, on AMD waves of a SIMD.
#if defined(__HIP__)
template <int kUnits>
constexpr int kBound = kUnits == 1 ? 4 : 2;
#else
template <int kUnits>
constexpr int kBound = kBlocks<kUnits>;
#endif

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
  const float *k_scale, *v_scale;   // of an FP8 cache: of all heads (step 0) or of each
  int64_t k_scale_step, v_scale_step;
  bool wide_weight, wide_positions;
  const float* cos_sin;
  const void* positions;
  const int64_t* slots;
  int64_t cos_sin_stride, positions_stride, slots_stride, max_position, num_slots, page_size, tokens;
  int q_heads, kv_heads, dim, half;
  float eps, inverse_dim;
};

// Where the two packs of unit u begin, and whether they are rotated.
struct Unit {
  int first, second;
  bool rotated;
};

template <bool kNeox, int N>
__device__ Unit unit_at(int u, const Task& task) {
  const int at = u * N;
  const bool rotated = at < task.half, apart = rotated && kNeox;
  return {apart ? at : 2 * at, apart ? at + task.half : 2 * at + N, rotated};
}

template <int N, class W>
__device__ void multiply(float (&x)[N], const W* weight, float scale) {
  W w[N];
  load_wide<(N == 1 ? 1 : kPackSize<W> < N ? kPackSize<W> : N)>(weight, w);
#pragma unroll
  for (int j = 0; j < N; j++) x[j] *= scale * to_float(w[j]);
}

// Cosines and sines of a unit's N pairs.
template <bool kNeox, int N>
struct Turn {
  float cos[N], sin[N];

  __device__ void load(const float* cos_sin, const Task& task, const Unit& unit) {
    const int pair = kNeox ? unit.first : unit.first / 2;
    load_wide<(N == 1 ? 1 : 4)>(cos_sin + pair, cos);
    load_wide<(N == 1 ? 1 : 4)>(cos_sin + task.half + pair, sin);
  }
  __device__ void pair(float& x, float& y, int i) const {
    const float low = x, high = y;
    x = low * cos[i] - high * sin[i];
    y = high * cos[i] + low * sin[i];
  }
  // Partners are a[j], b[j]; without neox neighbours in the sequence a, b.
  __device__ void apply(float (&a)[N], float (&b)[N]) const {
    if constexpr (kNeox || N == 1) {
#pragma unroll
      for (int j = 0; j < N; j++) pair(a[j], b[j], j);
    } else {
#pragma unroll
      for (int j = 0; j < N; j += 2) {
        pair(a[j], a[j + 1], j / 2);
        pair(b[j], b[j + 1], (N + j) / 2);
      }
    }
  }
};

// One division instruction sequence of 32 bits where that is enough, as it nearly always is.
__device__ inline int64_t short_quotient(int64_t a, int64_t b) {
  return (a | b) >> 32 == 0 ? static_cast<int64_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b))
                            : quotient(a, b);
}

// Fields are chosen one by one: choosing between the structs would make their addresses in memory matter.
__device__ inline Heads choose(bool first, const Heads a, const Heads b) {
  return {first ? a.data : b.data, first ? a.token : b.token, first ? a.head : b.head};
}

// All lanes of a warp run it together: the sum is over the kLanes lanes of a head. Position, slot and elements are
// asked for at once: what lies beyond the end is read from a place that exists, and not stored.
template <bool kNeox, int kLanes, int kUnits, int N, class T, bool kFp8>
__device__ void process(const Task& task, bool inside, int64_t token, int h) {
  const int lane = threadIdx.x % kLanes, units = task.dim / (2 * N);
  const int64_t at = token * task.positions_stride;
  const int64_t position = task.wide_positions ? static_cast<const int64_t*>(task.positions)[at]
                                               : static_cast<const int32_t*>(task.positions)[at];
  const int64_t slot = task.slots[token * task.slots_stride];
  // Head h of q, k and v, one after the other.
  const bool is_q = h < task.q_heads, is_k = !is_q && h < task.q_heads + task.kv_heads;
  const int head = h - (is_q ? 0 : is_k ? task.q_heads : task.q_heads + task.kv_heads);
  const Heads source = choose(is_q, task.q, choose(is_k, task.k, task.v));
  const T* from = reinterpret_cast<const T*>(source.data + token * source.token + head * source.head);
  Unit unit[kUnits];
  Pack<T, N> low[kUnits], high[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; i++) {
    unit[i] = unit_at<kNeox, N>(min(lane + i * kLanes, units - 1), task);
    low[i] = load_pack<N>(from + unit[i].first);
    high[i] = load_pack<N>(from + unit[i].second);
  }

  // A token whose position or slot does not exist is skipped; one with slot -1 is not stored.
  const bool exists = position >= 0 && position < task.max_position && slot >= -1 && slot < task.num_slots;
  const bool stored = inside && exists && (is_q || slot >= 0), normalised = task.q_weight && (is_q || is_k);
  const int64_t page = slot < 0 ? 0 : short_quotient(slot, task.page_size), offset = slot - page * task.page_size;
  const int64_t place = is_q   ? token * task.q.token
                        : is_k ? page * task.k_cache.page + offset * task.k_cache.slot
                               : page * task.v_cache.page + offset * task.v_cache.slot;
  const Heads cache = {is_k ? task.k_cache.data : task.v_cache.data, 0, is_k ? task.k_cache.head : task.v_cache.head};
  const Heads target = choose(is_q, task.q, cache);
  T* to = reinterpret_cast<T*>(target.data + place + head * target.head);
  const void* weight = is_q ? task.q_weight : task.k_weight;
  // Asked for as soon as the position is there, while the elements are still on their way.
  Turn<kNeox, N> turn[kUnits];
  const float* cos_sin = task.cos_sin + (exists ? position : 0) * task.cos_sin_stride;
#pragma unroll
  for (int i = 0; i < kUnits; i++) {
    unit[i].rotated = unit[i].rotated && (is_q || is_k);
    if (unit[i].rotated) turn[i].load(cos_sin, task, unit[i]);
  }

  float sum = 0;
#pragma unroll
  for (int i = 0; i < kUnits; i++) {
    float part = 0;
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float a = to_float(low[i].at[j]), b = to_float(high[i].at[j]);
      part += a * a + b * b;
    }
    sum += lane + i * kLanes < units ? part : 0.f;
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask >>= 1) sum += shuffle_xor(sum, mask);
  const float scale = rsqrtf(sum * task.inverse_dim + task.eps);
  if (!stored) return;
  float cache_scale = 1;
  if (kFp8 && !is_q)
    cache_scale = is_k ? task.k_scale[head * task.k_scale_step] : task.v_scale[head * task.v_scale_step];
#pragma unroll
  for (int i = 0; i < kUnits; i++) {
    if (lane + i * kLanes >= units) continue;
    float a[N], b[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
      a[j] = to_float(low[i].at[j]);
      b[j] = to_float(high[i].at[j]);
    }
    if (normalised && task.wide_weight) {
      multiply(a, static_cast<const float*>(weight) + unit[i].first, scale);
      multiply(b, static_cast<const float*>(weight) + unit[i].second, scale);
    } else if (normalised) {
      multiply(a, static_cast<const T*>(weight) + unit[i].first, scale);
      multiply(b, static_cast<const T*>(weight) + unit[i].second, scale);
    }
    if (unit[i].rotated) turn[i].apply(a, b);
    if (kFp8 && !is_q) {
      auto* codes = reinterpret_cast<uint8_t*>(to);
      divide(a, cache_scale);
      divide(b, cache_scale);
      store_pack<N>(codes + unit[i].first, to_fp8<NativeE4m3>(a));
      store_pack<N>(codes + unit[i].second, to_fp8<NativeE4m3>(b));
      continue;
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
      from_float(a[j], low[i].at[j]);
      from_float(b[j], high[i].at[j]);
    }
    store_pack<N>(to + unit[i].first, low[i]);
    store_pack<N>(to + unit[i].second, high[i]);
  }
}

template <bool kNeox, int kLanes, int kUnits, int N, class T, bool kFp8>
__global__ void __launch_bounds__(kThreads, kBound<kUnits>) fused_kernel(Task task) {
  wait_for_previous();
  constexpr int kGroups = kThreads / kLanes;
  const int heads = task.q_heads + 2 * task.kv_heads;
  const int64_t total = task.tokens * heads;
  for (int64_t first = int64_t{blockIdx.x} * kGroups; first < total; first += int64_t{gridDim.x} * kGroups) {
    const int64_t asked = first + threadIdx.x / kLanes, item = asked < total ? asked : total - 1;
    const int64_t token = short_quotient(item, heads);
    process<kNeox, kLanes, kUnits, N, T, kFp8>(task, asked < total, token, static_cast<int>(item - token * heads));
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
  int lanes, blocks;
};

template <bool kNeox, class T, bool kFp8>
Choice choose_kernel(const Task& task) {
  constexpr int N = kPackSize<T>;
  const int units = task.dim / (2 * N);
  if (!aligned(task) || task.dim % (2 * N) != 0 || task.half % N != 0)
    return {fused_kernel<kNeox, 16, 8, 1, T, kFp8>, 16, kBlocks<8>};
  if (units <= 8) return {fused_kernel<kNeox, 8, 1, N, T, kFp8>, 8, kBlocks<1>};
  return {fused_kernel<kNeox, 16, 2, N, T, kFp8>, 16, kBlocks<2>};
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
  if (args.k_scale) {
    require_native_fp8("fused_qk_norm_rope_store", "k_cache", *args.k_cache);
    task.k_scale = data_ptr<float>(*args.k_scale);
    task.v_scale = data_ptr<float>(*args.v_scale);
    task.k_scale_step = args.k_scale->shape[0] > 1 ? args.k_scale->strides[0] : 0;
    task.v_scale_step = args.v_scale->shape[0] > 1 ? args.v_scale->strides[0] : 0;
  }
  task.wide_positions = dtype_of(*args.positions) == DType::i64;
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
  task.inverse_dim = 1.f / static_cast<float>(task.dim);
  if (task.max_position == 0) return;  // no position exists; of one that does not the kernel reads row 0
  dispatch_float(dtype_of(q), [&](auto t) {
    using T = typename decltype(t)::type;
    const auto choose = [&](auto fp8) {
      constexpr bool kFp8 = decltype(fp8)::value;
      return args.is_neox ? choose_kernel<true, T, kFp8>(task) : choose_kernel<false, T, kFp8>(task);
    };
    const Choice choice = task.k_scale ? choose(std::true_type{}) : choose(std::false_type{});
    const int64_t items = task.tokens * (task.q_heads + 2 * task.kv_heads);
    launch_dependent("fused_qk_norm_rope_store", q.device, stream, choice.kernel,
                     blocks_for(items, kThreads / choice.lanes, choice.blocks * multiprocessors(q.device)), kThreads,
                     task);
  });
}

}  // namespace backend
}  // namespace radix
