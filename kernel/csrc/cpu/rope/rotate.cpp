// Rotates the heads of a token. Bound by bytes: every head is read and written once; the row of cosines and sines is
// shared by all heads of the token and stays in L1.
#include "cpu/rope/rope.h"
#include "cpu/simd.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
constexpr int kMaxRotaryDim = 1024;  // checked by api/rope.cpp

// Pairs (i, i + half); `count` lanes from i, the full width when it is W.
template <class T, class... Count>
inline void rotate_halves(T* x, const float* cos, const float* sin, int64_t half, int64_t i, Count... count) {
  const Vec a = load(x + i, count...), b = load(x + i + half, count...);
  const Vec c = load(cos + i, count...), s = load(sin + i, count...);
  store(x + i, fnma(b, s, a * c), count...);
  store(x + i + half, fma(a, s, b * c), count...);
}

template <class T>
void rotate_neox(T* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + W <= half; i += W) rotate_halves(x, cos, sin, half, i);
  if (i < half) rotate_halves(x, cos, sin, half, i, static_cast<int>(half - i));
}

// Pairs (2i, 2i + 1), with the tables already spread: c = (c0 c0 c1 c1 ...), s = (-s0 s0 -s1 s1 ...).
template <class T>
void rotate_interleaved(T* x, const float* c, const float* s, int64_t rotary_dim) {
  int64_t i = 0;
  for (; i + W <= rotary_dim; i += W) {
    const Vec a = load(x + i);
    store(x + i, fma(swap_pairs(a), load(s + i), a * load(c + i)));
  }
  if (const int tail = static_cast<int>(rotary_dim - i); tail > 0) {
    const Vec a = load(x + i, tail);
    store(x + i, fma(swap_pairs(a), load(s + i, tail), a * load(c + i, tail)), tail);
  }
}

template <class T, class Rotate>
void each_head(const RopeHeads& x, int64_t token, const Rotate& rotate) {
  char* p = x.data + token * x.token_stride;
  for (int64_t h = 0; h < x.heads; h++, p += x.head_stride) rotate(reinterpret_cast<T*>(p));
}

template <class T>
void rotate_tokens(const RopeTask& task, int64_t begin, int64_t end) {
  const int64_t half = task.rotary_dim / 2;
  for (int64_t token = begin; token < end; token++) {
    const float* cos = task.cache + task.positions[token] * task.cache_stride;
    const float* sin = cos + half;
    if (task.neox) {
      const auto rotate = [&](T* x) { rotate_neox(x, cos, sin, half); };
      each_head<T>(task.query, token, rotate);
      each_head<T>(task.key, token, rotate);
    } else {
      float c[kMaxRotaryDim], s[kMaxRotaryDim];
      for (int64_t i = 0; i < half; i++) {
        c[2 * i] = c[2 * i + 1] = cos[i];
        s[2 * i] = -sin[i];
        s[2 * i + 1] = sin[i];
      }
      const auto rotate = [&](T* x) { rotate_interleaved(x, c, s, task.rotary_dim); };
      each_head<T>(task.query, token, rotate);
      each_head<T>(task.key, token, rotate);
    }
  }
}

void rotate(const RopeTask& task, int64_t begin, int64_t end) {
  dispatch_float(task.dtype, [&](auto t) { rotate_tokens<typename decltype(t)::type>(task, begin, end); });
}

}  // namespace

const RopeKernels rope_table = {rotate};

}  // namespace radix::cpu::RK_ISA
