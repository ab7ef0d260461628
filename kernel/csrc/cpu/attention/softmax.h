// What a query sees and the softmax over it, shared by the attention kernels of one ISA level.
#pragma once

#include "cpu/attention/attention.h"
#include "cpu/simd_math.h"

namespace radix::cpu::RK_ISA {

constexpr float kNegInf = -__builtin_inff();

// KV positions [begin, end).
struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

inline int64_t lesser(int64_t a, int64_t b) {
  return a < b ? a : b;
}
inline int64_t greater(int64_t a, int64_t b) {
  return a > b ? a : b;
}

// The KV positions that a query at `position` of its row sees.
inline Range visible(const rk_attention_options& o, int64_t kv_len, int64_t position) {
  Range r{0, kv_len};
  if (o.causal || o.window_right == 0) r.end = lesser(kv_len, position + 1);
  if (o.window_left >= 0) r.begin = greater(0, position - o.window_left);
  return r;
}

inline float exp_scalar(float x) {
  float lanes[Vec::width];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

inline Vec tanh(Vec x) {
  const Vec t = exp(set1(-2.f) * abs(x));
  return copysign((set1(1.f) - t) / (set1(1.f) + t), x);
}

// s[begin, end) becomes exp(score - m); returns m and the sum.
inline void softmax(const rk_attention_options& o, float* s, int64_t begin, int64_t end, float& m, float& sum) {
  constexpr int W = Vec::width;
  const Vec scale = set1(o.softmax_scale), cap = set1(o.softcap);
  Vec top = set1(kNegInf);
  float tail_top = kNegInf;
  int64_t t = begin;
  const auto scaled = [&](Vec x) {
    x = x * scale;
    return o.softcap > 0 ? cap * tanh(x / cap) : x;
  };
  for (; t + W <= end; t += W) {
    const Vec x = scaled(load(s + t));
    store(s + t, x);
    top = max(top, x);
  }
  if (t < end) {
    const int n = static_cast<int>(end - t);
    store(s + t, scaled(load(s + t, n)), n);
    for (int i = 0; i < n; i++) tail_top = s[t + i] > tail_top ? s[t + i] : tail_top;
  }
  m = reduce_max(top);
  m = m > tail_top ? m : tail_top;
  // All scores -inf: nothing to see after all. (NaN scores may be missing in m, but stay NaN through exp.)
  const Vec shift = set1(m == kNegInf ? 0.f : m);
  Vec total = zero();
  for (t = begin; t + W <= end; t += W) {
    const Vec p = exp(load(s + t) - shift);
    store(s + t, p);
    total = total + p;
  }
  sum = reduce_sum(total);
  if (t < end) {
    const int n = static_cast<int>(end - t);
    store(s + t, exp(load(s + t, n) - shift), n);
    for (int i = 0; i < n; i++) sum += s[t + i];
  }
}

// The softmax of one query so far: maximum, sum and (not divided by it) value.
struct RunningSoftmax {
  float m = kNegInf, l = 0;

  // Takes in a part (m, l, value) that covers later positions; o: [dim].
  void combine(float* o, const float* part, int64_t dim, float part_m, float part_l) {
    if (part_m == kNegInf && part_l == 0.f) return;  // saw nothing; scores of NaN alone leave -inf too, but NaN sums
    const float top = m > part_m ? m : part_m;
    const float keep = m == kNegInf ? 0.f : exp_scalar(m - top), add = exp_scalar(part_m - top);
    const Vec vk = set1(keep), va = set1(add);
    for (int64_t d = 0; d < dim; d += Vec::width) store(o + d, fma(load(part + d), va, load(o + d) * vk));
    l = l * keep + part_l * add;
    m = top;
  }

  // Takes in the sink of head h, writes lse of q token t; returns what the values are to be multiplied with.
  float close(const AttentionTask& task, int64_t t, int64_t h) {
    float scale = 1.f;
    if (task.sinks) {
      const float sink = task.sinks[h], top = m > sink ? m : sink;
      scale = m == kNegInf ? 0.f : exp_scalar(m - top);
      l = l * scale + exp_scalar(sink - top);
      m = top;
    }
    if (task.lse)
      task.lse[t * task.lse_token_stride + h * task.lse_head_stride] = l == 0.f ? kNegInf : m + __builtin_logf(l);
    return l == 0.f ? 0.f : scale / l;  // l 0: nothing seen
  }

  // Writes out (and lse) of head h of q token t.
  template <class T>
  void finish(const AttentionTask& task, int64_t t, int64_t h, const float* o) {
    T* out = reinterpret_cast<T*>(task.out.data + t * task.out.token_stride + h * task.out.head_stride);
    const Vec factor = set1(close(task, t, h));
    for (int64_t d = 0; d < task.value_dim; d += Vec::width) store(out + d, load(o + d) * factor);
  }
};

}  // namespace radix::cpu::RK_ISA
