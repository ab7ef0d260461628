// Q/K norm, RoPE and KV store of a token, a head at a time in a buffer of floats. Bound by bytes: every element is read
// once and written once; the buffer stays in L1.
#include "cpu/fused_rope/fused_rope.h"
#include "cpu/kv_cache/quantize_head.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
constexpr int kMaxDim = 256;  // checked by api/fused_rope.cpp

// Calls fn(i, count...) over [0, n) a register at a time; `count` is given for the last, shorter one only.
template <class Fn>
inline void each(int64_t n, const Fn& fn) {
  int64_t i = 0;
  for (; i + W <= n; i += W) fn(i);
  if (i < n) fn(i, static_cast<int>(n - i));
}

template <class Weight>
void normalise(float* x, int64_t n, const Weight* weight, float eps) {
  Vec sum = zero();
  each(n, [&](int64_t i, auto... count) {
    const Vec v = load(x + i, count...);
    sum = fma(v, v, sum);
  });
  const Vec scale = set1(1.f / __builtin_sqrtf(reduce_sum(sum) / static_cast<float>(n) + eps));
  each(n, [&](int64_t i, auto... count) {
    store(x + i, load(x + i, count...) * scale * load(weight + i, count...), count...);
  });
}

void rotate(float* x, const FusedRopeTask& task, const float* cos) {
  const int64_t half = task.rotary_dim / 2;
  const float* sin = cos + half;
  if (!task.neox) {
    for (int64_t i = 0; i < half; i++) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  each(half, [&](int64_t i, auto... count) {
    const Vec a = load(x + i, count...), b = load(x + half + i, count...);
    const Vec c = load(cos + i, count...), s = load(sin + i, count...);
    store(x + i, fnma(b, s, a * c), count...);
    store(x + half + i, fma(a, s, b * c), count...);
  });
}

// A head of q or k, normalised and rotated, to x.
template <class T>
void turn_head(const FusedRopeTask& task, const char* from, float* x, const void* weight, const float* cos) {
  const T* in = reinterpret_cast<const T*>(from);
  each(task.dim, [&](int64_t i, auto... count) { store(x + i, load(in + i, count...), count...); });
  if (weight && task.weight_dtype == DType::f32) {
    normalise(x, task.dim, static_cast<const float*>(weight), task.eps);
  } else if (weight) {
    normalise(x, task.dim, static_cast<const T*>(weight), task.eps);
  }
  rotate(x, task, cos);
}

template <class T>
void head(const FusedRopeTask& task, const char* from, char* to, const void* weight, const float* cos) {
  float x[kMaxDim];
  turn_head<T>(task, from, x, weight, cos);
  T* out = reinterpret_cast<T*>(to);
  each(task.dim, [&](int64_t i, auto... count) { store(out + i, load(x + i, count...), count...); });
}

// The keys and values of token t to a slot of INT8 caches.
template <class T>
void quantize_token(const FusedRopeTask& task, int64_t t, int64_t page, int64_t slot, const float* cos) {
  const auto at = [&](const CacheHeads& x, int64_t h) { return x.data + page * x.page + slot * x.slot + h * x.head; };
  for (int64_t h = 0; h < task.kv_heads; h++) {
    float x[kMaxDim];
    turn_head<T>(task, task.k.data + t * task.k.token + h * task.k.head, x, task.k_weight, cos);
    quantize_head(x, task.dim, reinterpret_cast<int8_t*>(at(task.k_cache, h)),
                  reinterpret_cast<float*>(at(task.k_scale, h)));
    quantize_head(reinterpret_cast<const T*>(task.v.data + t * task.v.token + h * task.v.head), task.dim,
                  reinterpret_cast<int8_t*>(at(task.v_cache, h)), reinterpret_cast<float*>(at(task.v_scale, h)));
  }
}

template <class T>
void run_tokens(const FusedRopeTask& task, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++) {
    const float* cos = task.cos_sin + task.positions[t] * task.cos_sin_stride;
    for (int64_t h = 0; h < task.q_heads; h++) {
      char* q = task.q.data + t * task.q.token + h * task.q.head;
      head<T>(task, q, q, task.q_weight, cos);
    }
    if (task.slots[t] < 0) continue;
    const int64_t page = task.slots[t] / task.page_size, slot = task.slots[t] % task.page_size;
    if (task.k_scale.data) {
      quantize_token<T>(task, t, page, slot, cos);
      continue;
    }
    char* k_cache = task.k_cache.data + page * task.k_cache.page + slot * task.k_cache.slot;
    char* v_cache = task.v_cache.data + page * task.v_cache.page + slot * task.v_cache.slot;
    for (int64_t h = 0; h < task.kv_heads; h++) {
      head<T>(task, task.k.data + t * task.k.token + h * task.k.head, k_cache + h * task.k_cache.head, task.k_weight,
              cos);
      __builtin_memcpy(v_cache + h * task.v_cache.head, task.v.data + t * task.v.token + h * task.v.head,
                       static_cast<size_t>(task.dim) * sizeof(T));
    }
  }
}

void run(const FusedRopeTask& task, int64_t begin, int64_t end) {
  dispatch_float(task.dtype, [&](auto t) { run_tokens<typename decltype(t)::type>(task, begin, end); });
}

}  // namespace

const FusedRopeKernels fused_rope_table = {run};

}  // namespace radix::cpu::RK_ISA
