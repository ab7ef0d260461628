// Routing of a token in buffers of floats and order-preserving keys, and the sum over a token's experts.
#include "cpu/moe/moe.h"
#include "cpu/simd_math.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
constexpr int kMaxExperts = 1024, kMaxTopk = 32;  // checked by api/moe.cpp
constexpr uint32_t kTaken = 0, kNanKey = 1;       // below the key of every number
constexpr float kLeastSum = 1e-20f;

// Calls fn(i, count...) over [0, n) a register at a time; `count` is given for the last, shorter one only.
template <class Fn>
inline void each(int64_t n, const Fn& fn) {
  int64_t i = 0;
  for (; i + W <= n; i += W) fn(i);
  if (i < n) fn(i, static_cast<int>(n - i));
}

inline Vec sigmoid(Vec x) {
  return set1(1.f) / (set1(1.f) + exp(zero() - x));
}

// Larger numbers have larger keys, -0 that of +0, NaN the lowest.
inline uint32_t key_of(float x) {
  if (x != x) return kNanKey;
  const float plus = x + 0.f;
  uint32_t bits;
  __builtin_memcpy(&bits, &plus, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The first of the largest.
inline int64_t largest_key(const uint32_t* key, int64_t n) {
  uint32_t best = 0;
  for (int64_t i = 0; i < n; i++) best = key[i] > best ? key[i] : best;
  int64_t at = 0;
  while (key[at] != best) at++;
  return at;
}

// Takes out the keys of all groups but the best ones: a group's score is its largest number or, of sigmoids, the sum of
// its two largest.
void keep_groups(const RouteTask& task, const float* choice, uint32_t* key) {
  const int64_t size = task.experts / task.groups;
  uint32_t score[kMaxExperts];
  for (int64_t g = 0; g < task.groups; g++) {
    uint32_t* member = key + g * size;
    const int64_t top = largest_key(member, size);
    float sum = choice[g * size + top];
    if (task.sigmoid && size > 1) {
      const uint32_t saved = member[top];
      member[top] = kTaken;
      sum += choice[g * size + largest_key(member, size)];
      member[top] = saved;
    }
    score[g] = key_of(sum);
  }
  bool stays[kMaxExperts] = {};
  for (int64_t r = 0; r < task.kept; r++) {
    const int64_t g = largest_key(score, task.groups);
    score[g] = kTaken;
    stays[g] = true;
  }
  for (int64_t i = 0; i < task.experts; i++)
    if (!stays[i / size]) key[i] = kTaken;
}

template <class T>
void route_token(const RouteTask& task, int64_t token) {
  const int64_t n = task.experts;
  const T* logits = reinterpret_cast<const T*>(task.logits + token * task.stride);
  float x[kMaxExperts], choice[kMaxExperts], score[kMaxExperts];
  uint32_t key[kMaxExperts];
  each(n, [&](int64_t i, auto... count) { store(x + i, load(logits + i, count...), count...); });
  const float* by = x;
  if (task.sigmoid) {
    each(n, [&](int64_t i, auto... count) {
      const Vec s = sigmoid(load(x + i, count...));
      store(score + i, s, count...);
      if (task.bias) store(choice + i, s + load(task.bias + i, count...), count...);
    });
    if (task.bias) by = choice;
  }
  bool nan = false;
  for (int64_t i = 0; i < n; i++) {
    nan |= x[i] != x[i];
    key[i] = key_of(by[i]);
  }
  if (task.groups > 1) keep_groups(task, by, key);

  const int64_t columns = task.topk + task.shared;
  int32_t* ids = task.ids + token * columns;
  float* weights = task.weights + token * columns;
  for (int64_t r = 0; r < task.topk; r++) {
    const int64_t at = largest_key(key, n);
    key[at] = kTaken;
    ids[r] = static_cast<int32_t>(at);
  }
  float factor = task.scale, sum = 0;
  if (task.sigmoid) {
    for (int64_t r = 0; r < task.topk; r++) sum += weights[r] = score[ids[r]];
    if (task.renormalize) factor /= sum + kLeastSum;
  } else {
    const Vec largest = set1(x[ids[0]]);
    float top[kMaxTopk];
    for (int64_t r = 0; r < task.topk; r++) top[r] = x[ids[r]];
    each(task.topk,
         [&](int64_t i, auto... count) { store(weights + i, exp(load(top + i, count...) - largest), count...); });
    if (task.renormalize) {
      for (int64_t r = 0; r < task.topk; r++) sum += weights[r];
    } else {
      each(n, [&](int64_t i, auto... count) { store(score + i, exp(load(x + i, count...) - largest), count...); });
      Vec total = zero();
      each(n, [&](int64_t i, auto... count) { total = total + load(score + i, count...); });
      sum = reduce_sum(total);
    }
    factor /= sum;
  }
  if (nan) factor = __builtin_nanf("");
  for (int64_t r = 0; r < task.topk; r++) weights[r] *= factor;
  for (int64_t i = 0; i < task.shared; i++) {
    weights[task.topk + i] = nan ? factor : 1.f;
    ids[task.topk + i] = static_cast<int32_t>(n + i);
  }
}

void route(const RouteTask& task, int64_t begin, int64_t end) {
  dispatch_float(task.dtype, [&](auto t) {
    for (int64_t token = begin; token < end; token++) route_token<typename decltype(t)::type>(task, token);
  });
}

template <class T>
void weighted_sum(const SumTask& task, int64_t token) {
  const int32_t* place = task.places + token * task.topk;
  const float* weight = task.weights + token * task.topk;
  T* out = reinterpret_cast<T*>(task.out + token * task.out_stride);
  each(task.hidden, [&](int64_t i, auto... count) {
    Vec total = zero();
    for (int64_t k = 0; k < task.topk; k++) {
      if (place[k] < 0) continue;
      const T* row = reinterpret_cast<const T*>(task.input + place[k] * task.expert_stride);
      total = total + set1(weight[k]) * load(row + i, count...);
    }
    store(out + i, total, count...);
  });
}

void sum(const SumTask& task, int64_t begin, int64_t end) {
  dispatch_float(task.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    for (int64_t token = begin; token < end; token++) {
      if (task.places) {
        weighted_sum<T>(task, token);
        continue;
      }
      const char* input = task.input + token * task.token_stride;
      T* out = reinterpret_cast<T*>(task.out + token * task.out_stride);
      each(task.hidden, [&](int64_t i, auto... count) {
        Vec total = zero();
        for (int64_t k = 0; k < task.topk; k++)
          total = total + load(reinterpret_cast<const T*>(input + k * task.expert_stride) + i, count...);
        store(out + i, total, count...);
      });
    }
  });
}

}  // namespace

const MoeKernels moe_table = {route, sum};

}  // namespace radix::cpu::RK_ISA
